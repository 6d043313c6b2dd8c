"""Publishers and subscribers: of SRTM's brokers through their controller, or of a stock nsqd.

async with Publisher("traffic") as publisher:
    await publisher.publish(b"hello")
"""

from srtm.client.cluster import Cluster
from srtm.client.publisher import Publisher
from srtm.client.subscriber import Message, Subscriber

__all__ = ["Cluster", "Message", "Publisher", "Subscriber"]

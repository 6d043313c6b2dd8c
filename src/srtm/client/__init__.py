"""Publishers and subscribers, for SRTM clusters through their controller and for stock nsqds.

async with Publisher("traffic") as publisher:
    await publisher.publish(b"hello")
"""

from srtm.client.cluster import Cluster
from srtm.client.publisher import Publisher
from srtm.client.subscriber import Message, Subscriber

__all__ = ["Cluster", "Message", "Publisher", "Subscriber"]

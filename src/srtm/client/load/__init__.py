"""An open-loop load: publishers that send on schedule, however the cluster copes, and a report of what came back.

In: a workload, and where to publish. Out: a `LoadReport`. `schedule` says what is due when, `run` writes it, `ears`
hear it again, and `tally` counts.

Latency runs from the scheduled time to the kernel's arrival time at the subscriber's socket, so a load that falls
behind cannot hide it, and its own reading and counting add nothing. At an engine that speaks another protocol than
NSQ's, or TLS, the arrival time is that of reading. The report also says how late the load wrote: if that is a
considerable part of the latency, the load was the bottleneck and not the cluster. Without a channel, latency ends at
the broker's answer; brokers with a delivery engine answer once the engine has the message, or the disk if the topic is
durable.
"""

from srtm.client.load.options import LoadOptions, own_channel
from srtm.client.load.report import LoadReport, Progress
from srtm.client.load.run import Load
from srtm.client.load.schedule import declared

__all__ = ["Load", "LoadOptions", "LoadReport", "Progress", "declared", "own_channel"]

"""`srtm controller`: discovery and control of brokers."""

from __future__ import annotations

from srtm.cli.common import check_logs, flags_of
from srtm.control.options import ControllerOptions


@flags_of(ControllerOptions)
def controller(options: ControllerOptions) -> None:
    """Run the controller, until it is told to stop (Ctrl-C or SIGTERM).

    Brokers register with it, and consumers find them through it, as with nsqlookupd. Example:

        srtm controller

        srtm broker --lookupd-tcp-address 127.0.0.1:4160
    """
    from srtm import program
    from srtm.control.run import run
    from srtm.web import page

    check_logs(options.log_format, options.log_level)
    program.log_to_stderr(options.log_format, options.log_level)
    program.run(run(options, page))

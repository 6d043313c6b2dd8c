"""`srtm controller`: discovery and control of brokers."""

from __future__ import annotations

from srtm.cli.flags import flags_of
from srtm.control.options import ControllerOptions
from srtm.options import check_logs


@flags_of(ControllerOptions)
def controller(options: ControllerOptions) -> None:
    """Run the controller until Ctrl-C or SIGTERM.

    Brokers register with the controller, and consumers find them through it, as with nsqlookupd.
    The controller also keeps topics under contract: it places their publishers and grants brokers their shares.

    Examples:
        srtm controller --data-path data
        srtm broker --controller 127.0.0.1:4160
    """
    from srtm import program
    from srtm.control.run import run
    from srtm.web import page

    check_logs(options.log_format, options.log_level)
    program.log_to_stderr(options.log_format, options.log_level)
    program.run(run(options, page))

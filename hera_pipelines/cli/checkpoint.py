"""``tiphys checkpoint``: what can be done with one checkpoint of a run."""

import typer

from hera_pipelines.cli import advice, checkpoints, pins

app = typer.Typer(help="Single checkpoints of a run: look at them, compare them, keep one.", no_args_is_help=True)
app.command("list", epilog=checkpoints.LIST_EXAMPLES)(checkpoints.list_checkpoints)
app.command("show", epilog=checkpoints.SHOW_EXAMPLES)(checkpoints.show)
app.command("diff", epilog=checkpoints.DIFF_EXAMPLES)(checkpoints.diff)
app.command("pin", epilog=pins.PIN_EXAMPLES)(pins.pin)
app.command("unpin", epilog=pins.UNPIN_EXAMPLES)(pins.unpin)
app.command("advice", epilog=advice.EXAMPLES)(advice.advice)

"""``tiphys checkpoint``: what can be done with one checkpoint of a run."""

import typer

from hera_pipelines.cli import pins

app = typer.Typer(help="Single checkpoints of a run: keep one for good.", no_args_is_help=True)
app.command("pin", epilog=pins.PIN_EXAMPLES)(pins.pin)
app.command("unpin", epilog=pins.UNPIN_EXAMPLES)(pins.unpin)

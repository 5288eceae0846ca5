"""``tiphys config``: shows the configuration with the source of each value, and changes the configuration file."""

from typing import Annotated

import typer
from tiphys_controller import API_VERSION

from hera_pipelines.cli.cluster.config.config_file import SETTINGS, ConfigFile, read_config_file
from hera_pipelines.cli.cluster.config.profile import PROFILE_OPTION, Setting, choose_profile, profile_setting
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import FormatOption, choose_store
from tiphys.errors import UsageError

EXAMPLES = """\b
Examples:
  tiphys config
  tiphys config set store s3://ml-runs/tiphys
  tiphys config set context east --profile east
  tiphys config use east
  tiphys config unset namespace
  tiphys runs --profile east
"""
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help=f"One of {', '.join(SETTINGS)}.")]
_UNSET = Setting("", "the kubeconfig")


def config(command: typer.Context, output: FormatOption = Format.TABLE) -> None:
    """Show the configuration, with the source of each value, or change it.

    The values hold for commands without the option --store, --context or -n. They
    are in config.toml below $XDG_CONFIG_HOME/tiphys or ~/.config/tiphys: defaults,
    and profiles that replace them. The namespace is that of Workflows.
    """
    if command.invoked_subcommand:
        return
    screen: Screen = command.obj
    file = read_config_file()
    settings = {
        "profile": choose_profile(file),
        "store": choose_store(None),
        "context": profile_setting("context") or _UNSET,
        "namespace": profile_setting("namespace") or _UNSET,
    }
    if output is Format.TABLE:
        screen.table(("KEY", "VALUE", "FROM"), [(key, *setting[:2]) for key, setting in settings.items()])
        screen.note(f"profiles of {file.path}: {', '.join(file.profiles) or 'none'}")
        return
    rows = [{"key": key, "value": setting.value, "source": setting.source} for key, setting in settings.items()]
    document = {"apiVersion": API_VERSION, "kind": "Configuration", "file": str(file.path)}
    screen.document({**document, "settings": rows, "profiles": file.profiles}, output)


def set_value(
    command: typer.Context, key: KeyArgument, value: Annotated[str, typer.Argument(metavar="VALUE", help="Its value.")]
) -> None:
    """Set a default, or with --profile a value of that profile, which is added if it is new."""
    file, profile = read_config_file(), PROFILE_OPTION.get()
    if profile:
        file.check_setting("profile", profile, ("profile",))
    values = file.profiles.setdefault(profile, {}) if profile else file.defaults
    values[key] = file.check_setting(key, value)
    _write(command, file, f"{key} in {_table_name(profile)} is {value}")


def unset(command: typer.Context, key: KeyArgument) -> None:
    """Remove a default, or with --profile a value of that profile."""
    file, profile = read_config_file(), PROFILE_OPTION.get()
    file.check_key(key)
    if file.table(profile or "").pop(key, None) is None:
        raise UsageError(f"config file {file.path}: there is no {key} in {_table_name(profile)} to remove")
    _write(command, file, f"{key} is removed from {_table_name(profile)}")


def use(
    command: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of a profile; an empty one leaves the defaults alone.")
    ],
) -> None:
    """Use a profile from now on, unless --profile or TIPHYS_PROFILE names another."""
    file = read_config_file()
    file.table(name)
    file.profile = name
    _write(command, file, f"profile {name} is in use" if name else "no profile is in use")


def _table_name(profile: str | None) -> str:
    return f"profile {profile}" if profile else "the defaults"


def _write(command: typer.Context, file: ConfigFile, done: str) -> None:
    file.write()
    screen: Screen = command.obj
    screen.note(f"config file {file.path}: {done}")


app = typer.Typer(invoke_without_command=True)
app.callback(epilog=EXAMPLES)(config)
for change in (set_value, unset, use):
    app.command(change.__name__.removesuffix("_value"), epilog=EXAMPLES)(change)

"""Reads and writes the configuration file, a TOML file below ``XDG_CONFIG_HOME`` (``~/.config``).

A file has defaults at its top, and sets of values that replace them::

    profile = "east"                 # profile in use
    store = "s3://ml-runs/tiphys"    # default

    [profiles.east]
    store = "s3://east-runs/tiphys"
    context = "east"
    namespace = "ml"
"""

import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiphys.errors import UsageError, unknown_name_message

SETTINGS = ("store", "context", "namespace")
"""Keys of a profile: URL of the runs, context of the kubeconfig, and namespace of Workflows."""

_PROFILE, _PROFILES = "profile", "profiles"
_HEADER = "# Written by `tiphys config`, which does not keep comments.\n"
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_URL = re.compile(r"[a-z0-9]+://")


@dataclass
class ConfigFile:
    """Contents of the configuration file; empty if there is no file."""

    path: Path
    profile: str = ""
    """Profile in use unless the command names one; empty for none."""
    defaults: dict[str, str] = field(default_factory=dict)
    profiles: dict[str, dict[str, str]] = field(default_factory=dict)

    def table(self, profile: str) -> dict[str, str]:
        """Settings of a profile, or the defaults if ``profile`` is empty.

        Raises:
            UsageError: there is no such profile.
        """
        if not profile:
            return self.defaults
        if profile not in self.profiles:
            raise UsageError(
                unknown_name_message(f"config file {self.path}", "profile", profile, self.profiles)
                + f"; `tiphys --profile {profile} config set KEY VALUE` adds it"
            )
        return self.profiles[profile]

    def check_setting(self, key: str, value: object, known: Iterable[str] = SETTINGS) -> str:
        """Return ``value`` if it is one for ``key``.

        Raises:
            UsageError: the key is unknown, or the value is no text, is empty, or is a relative path.
        """
        self.check_key(key, known)
        if not isinstance(value, str) or not value or not value.isprintable():
            raise UsageError(f"config file {self.path}: {key} must be a text of printable characters, not {value!r}")
        if key == "store" and not _URL.match(value) and not Path(value).is_absolute():
            raise UsageError(f"config file {self.path}: store {value!r} must be a URL or an absolute path")
        return value

    def check_key(self, key: str, known: Iterable[str] = SETTINGS) -> None:
        """Raise `UsageError` for an unknown key."""
        if key not in known:
            raise UsageError(unknown_name_message(f"config file {self.path}", "key", key, known))

    def write(self) -> None:
        """Replace the file atomically; only its owner may read it."""
        target = self.path.resolve()  # the file may be a link into a folder under version control
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # with mode 0600
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(self._format())
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink()
            raise

    def _format(self) -> str:
        lines = [_HEADER, *_format_values({_PROFILE: self.profile, **self.defaults} if self.profile else self.defaults)]
        for name, values in self.profiles.items():
            lines += [f"\n[{_PROFILES}.{name if _BARE_KEY.fullmatch(name) else _format_string(name)}]\n"]
            lines += _format_values(values)
        return "".join(lines)


def config_path() -> Path:
    """Path of the configuration file. A relative ``XDG_CONFIG_HOME`` is ignored, as its specification says."""
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    folder = base if base.is_absolute() else Path(os.environ.get("HOME", "/"), ".config")
    return folder / "tiphys" / "config.toml"


def read_config_file() -> ConfigFile:
    """Read the configuration file.

    Raises:
        UsageError: it is not TOML, or has an unknown key or a wrong value; the message names file, key and value.
    """
    config = ConfigFile(config_path())
    try:
        document = tomllib.loads(config.path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return config
    except ValueError as error:  # text that is not TOML, or not UTF-8
        raise UsageError(f"config file {config.path}: {error}") from error
    for key, value in document.items():
        if key == _PROFILES:
            config.profiles = {name: _read_table(config, name, table) for name, table in _tables(config, value).items()}
        elif key == _PROFILE:
            config.profile = config.check_setting(key, value, (_PROFILE,))
        else:
            config.defaults[key] = config.check_setting(key, value, (_PROFILE, *SETTINGS, _PROFILES))
    return config


def _tables(config: ConfigFile, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"config file {config.path}: profiles must be tables such as [profiles.east]")
    return value


def _read_table(config: ConfigFile, profile: str, table: object) -> dict[str, str]:
    if not isinstance(table, dict):
        raise UsageError(f"config file {config.path}: profile {profile!r} must be a table, [profiles.{profile}]")
    return {key: config.check_setting(key, value) for key, value in table.items()}


def _format_values(values: Mapping[str, str]) -> list[str]:
    return [f"{key} = {_format_string(value)}\n" for key, value in values.items()]


def _format_string(text: str) -> str:
    # For printable characters, a basic string of TOML is a string of JSON.
    return json.dumps(text, ensure_ascii=False)

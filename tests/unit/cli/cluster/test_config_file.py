"""The configuration file: what it may hold, how an error names it, and that what is written is what is read."""

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hera_pipelines.cli.cluster.config.config_file import ConfigFile, config_path, read_config_file
from tiphys.errors import UsageError

TEXTS = st.text(min_size=1).filter(str.isprintable)
TABLES = st.fixed_dictionaries(
    {}, optional={"store": TEXTS.map("s3://{}".format), "context": TEXTS, "namespace": TEXTS}
)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of the configuration file, in a folder that exists."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "tiphys").mkdir()
    return tmp_path / "tiphys" / "config.toml"


@given(profile=st.just("") | TEXTS, defaults=TABLES, profiles=st.dictionaries(TEXTS, TABLES, max_size=3))
def test_a_written_configuration_file_reads_back_the_same(
    profile: str,
    defaults: dict[str, str],
    profiles: dict[str, dict[str, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        written = ConfigFile(config_path(), profile, defaults, profiles)
        written.write()
        assert read_config_file() == written


def test_a_missing_file_has_no_values(path: Path) -> None:
    assert read_config_file() == ConfigFile(path)


@pytest.mark.parametrize("base", ["", "relative"])
def test_without_an_absolute_folder_the_file_is_below_home(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", base)
    monkeypatch.setenv("HOME", "/home/ada")
    assert config_path() == Path("/home/ada/.config/tiphys/config.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('stroe = "s3://a/b"', "has no key 'stroe'; did you mean 'store'?"),
        ('[profiles.east]\nnamespaces = "ml"', "has no key 'namespaces'; did you mean 'namespace'?"),
        ("context = 1", "context must be a text of printable characters, not 1"),
        ('context = "a\\u0007"', "context must be a text of printable characters, not 'a\\x07'"),
        ('namespace = ""', "namespace must be a text"),
        ('store = "runs"', "store 'runs' must be a URL or an absolute path"),
        ('profiles = "east"', "profiles must be tables such as [profiles.east]"),
        ("[profiles]\neast = 1", "profile 'east' must be a table, [profiles.east]"),
        ("store = @", "at line 1, column 9"),
        (b"store = '\xff'", "can't decode byte 0xff"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(text: str | bytes, message: str, path: Path) -> None:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as refused:
        read_config_file()
    assert f"config file {path}" in str(refused.value)
    assert message in str(refused.value)


def test_only_its_owner_may_read_the_file(path: Path) -> None:
    path.touch(0o644)
    ConfigFile(path, defaults={"context": "east"}).write()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "dotfiles.toml")
    ConfigFile(path, defaults={"context": "east"}).write()
    assert path.is_symlink()
    assert 'context = "east"' in (tmp_path / "dotfiles.toml").read_text()

"""Versions of data that other tools manage, read when a pipeline is compiled."""

from hera_pipelines.authoring.data_versions import dvc, lakefs
from hera_pipelines.compile.settings import DataSource, Dvc
from tiphys.records import DataVersion


def read_data_version(source: DataSource) -> DataVersion:
    """Read the version that ``source`` has now.

    Raises:
        UsageError: the file of DVC is damaged, or the package for lakeFS is not installed.
        NotFoundError: file, output, repository or ref does not exist.
        SettingsError: lakeFS refuses the credentials, or there are none.
        StoreError: lakeFS does not answer.
    """
    return dvc.read_version(source) if isinstance(source, Dvc) else lakefs.read_version(source)

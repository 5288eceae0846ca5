"""`PluginTemplate`: a template for any executor plugin, which Hera has no class for.

Hera's model of a plugin has no field for the body, so `Pipeline` writes the body
into the compiled document.
"""

from dataclasses import dataclass, field
from typing import Any

from hera.workflows._meta_mixins import CallableTemplateMixin
from hera.workflows._mixins import IOMixin, TemplateMixin
from hera.workflows.models import Plugin, Template

from tiphys.errors import UsageError


@dataclass(kw_only=True)
class PluginTemplate(IOMixin, TemplateMixin, CallableTemplateMixin):
    """A template that an executor plugin answers.

    Attributes:
        body: ``{"plugin-name": {…}}``, with exactly one key. Compile leaves it
            as written; Argo fills in its placeholders.
    """

    body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.body) != 1:
            raise UsageError(
                f"plugin template {self.name!r}: body must have exactly one key, the plugin's name; "
                f"it has {sorted(self.body) or 'none'}"
            )

    def _build_template(self) -> Template:
        return Template(
            name=self.name,
            inputs=self._build_inputs(),
            outputs=self._build_outputs(),
            metadata=self._build_metadata(),
            plugin=Plugin(),
            retry_strategy=self._build_retry_strategy(),
            synchronization=self.synchronization,
            timeout=self.timeout,
        )

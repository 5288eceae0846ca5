"""Final phases.

| Phase                      | Workflow | Pod   |
|----------------------------|----------|-------|
| none yet, Pending, Running | goes on  | lives |
| Unknown                    | goes on  | lives |
| Succeeded, Failed          | final    | final |
| Error                      | final    | none  |
"""

import pytest

from tiphys.protocol.phases import is_final_pod_phase, is_final_workflow_phase


@pytest.mark.parametrize(
    ("phase", "workflow", "pod"),
    [
        (None, False, False),
        ("", False, False),
        ("Pending", False, False),
        ("Running", False, False),
        ("Unknown", False, False),
        ("Succeeded", True, True),
        ("Failed", True, True),
        ("Error", True, False),
        ("succeeded", False, False),
    ],
)
def test_final_phases(phase, workflow, pod):
    assert (is_final_workflow_phase(phase), is_final_pod_phase(phase)) == (workflow, pod)

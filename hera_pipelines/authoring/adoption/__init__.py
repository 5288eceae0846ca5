"""Adopts Workflows that know nothing of Tiphys: finds their steps, marks them, and compiles what is marked."""

from hera_pipelines.authoring.adoption.documents import ArgoDocument, read_argo_documents
from hera_pipelines.authoring.adoption.proposals import Adoption, Proposal, propose_adoption
from hera_pipelines.authoring.adoption.yaml_pipeline import YamlPipeline

__all__ = ["Adoption", "ArgoDocument", "Proposal", "YamlPipeline", "propose_adoption", "read_argo_documents"]

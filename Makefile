# Each target installs what it needs. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# uv installs the locked packages; it is installed into .tools where it is absent.
UV := $(shell command -v uv || echo .tools/bin/uv)
RUN := $(UV) run --no-sync
IN_BROWSER := $(UV) run --quiet --isolated --frozen --all-extras --no-extra torch --no-extra mlflow --group browser
SBOM_DIR := build/sbom
SBOM = $(UV) export --quiet --locked --preview-features sbom-export --format cyclonedx1.5 --no-dev
EMULATORS := build/emulators
FAKE_GCS := v1.56.1
# Later ones need Node 22.
AZURITE := 3.35.0
# The harness needs only Python.
HARNESS := PYTHONPATH=tests PYTHONDONTWRITEBYTECODE=1 python3 -m cluster

##@ Start
help:  ## list the targets by group
	@awk 'BEGIN {FS = ":[^#]*  ## "} /^##@ / {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*  ## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.tools/bin/uv:
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Tiphys needs Python 3.11 or newer as python3; found $$(python3 --version)" >&2; exit 2; }
	@echo "uv is not installed; installing it into .tools" >&2
	python3 -m venv .tools
	.tools/bin/python -m pip install --quiet --require-hashes --requirement plugin/uv.txt

setup: $(filter .tools/bin/uv,$(UV))  ## install the locked packages into .venv
	@$(UV) sync --quiet --locked --all-extras --no-extra torch --no-extra mlflow

demo: setup  ## watch a training run survive kills, corruption and a lost orchestrator
	@$(RUN) tiphys demo

##@ Tests
test: setup  ## run the tests (COVERAGE=1: and hold the coverage of tiphys/ at 92 %)
	@$(RUN) python -m pytest $(if $(COVERAGE),--cov --cov-report=term:skip-covered)

argo-examples: setup  ## adopt and compile the Workflows of EXAMPLES=FOLDER, such as Argo's own, and print what became of them
	@TIPHYS_ARGO_EXAMPLES="$(abspath $(EXAMPLES))" $(RUN) pytest -q -s -n0 tests/unit/authoring/adoption/test_differences.py -k folder

fuzz: setup  ## run property tests with random seeds for 10 minutes (MINUTES=60; SEED=7 repeats a round)
	@PYTHONPATH=tests $(RUN) python -m runner.fuzz $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

chaos: setup  ## simulate hours of faults, seed by seed, and judge what is left (MINUTES=60; HOURS=1 of faults for each seed; SEED=7 SEEDS=1 repeats one; BUG=no_fence plants a bug)
	@PYTHONHASHSEED=0 PYTHONPATH=tests $(RUN) python -m chaos $(if $(MINUTES),--minutes $(MINUTES)) $(if $(HOURS),--hours $(HOURS)) $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(BUG),--bug $(BUG))

mutants: setup  ## plant bugs and count those that tests notice (MINUTES=60, SEED=1, SAMPLE=30, AREA=ledger, KIND=key)
	@PYTHONPATH=tests $(RUN) python -m runner.mutants $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(AREA),--area $(AREA)) $(if $(KIND),--kind $(KIND))

test-integration: setup  ## run the tests that `make test` leaves out: programs and services in processes, and hundreds of kills
	@$(RUN) pytest -m heavy -n 2

emulators:  ## install the emulators of Google Cloud Storage and Azure for the tests, by Go and npm, in build/emulators
	@mkdir -p $(EMULATORS)
	@[ -x $(EMULATORS)/fake-gcs-server-$(FAKE_GCS) ] || { GOBIN=$(CURDIR)/$(EMULATORS) GOFLAGS=-buildvcs=false go install github.com/fsouza/fake-gcs-server@$(FAKE_GCS) && mv $(EMULATORS)/fake-gcs-server $(EMULATORS)/fake-gcs-server-$(FAKE_GCS); }
	@ln -sf fake-gcs-server-$(FAKE_GCS) $(EMULATORS)/fake-gcs-server
	@npm ls --prefix $(EMULATORS) azurite@$(AZURITE) >/dev/null 2>&1 || npm install --prefix $(EMULATORS) --no-audit --no-fund --ignore-scripts --loglevel=error --prefer-offline azurite@$(AZURITE)

test-stores: setup emulators  ## run the tests of every store, with emulators of Google Cloud Storage and Azure
	@TIPHYS_EMULATORS=required $(RUN) pytest -n 2 tests/contract/test_store.py tests/contract/test_clouds.py

test-torch: $(filter .tools/bin/uv,$(UV))  ## run the tests that need PyTorch or JAX, in a separate environment (5 GB)
	@UV_PROJECT_ENVIRONMENT=.venv-torch $(UV) sync --quiet --locked --all-extras --no-extra mlflow --group torch
	@UV_PROJECT_ENVIRONMENT=.venv-torch $(RUN) pytest tests/pytorch tests/security/test_unpickling.py --ignore tests/pytorch/test_jax.py
	@UV_PROJECT_ENVIRONMENT=.venv-torch $(RUN) pytest -n0 tests/pytorch/test_jax.py  # alone: no test may fork once JAX has threads

test-programs: setup  ## kill the programs of ten libraries; writes reports/programs.json (QUICK=1: no report; PROGRAM=, KILLS=, MINUTES=, SEED=, SIGNAL=term)
	@UV_PROJECT_ENVIRONMENT=.venv-torch $(UV) sync --quiet --locked --all-extras --no-extra mlflow --group torch
	@UV_PROJECT_ENVIRONMENT=.venv-programs $(UV) sync --quiet --locked --no-default-groups --extra numpy --group programs
	@PYTHONPATH=tests $(RUN) python -m programs $(if $(QUICK),--quick) $(if $(KILLS),--kills $(KILLS)) $(if $(SEED),--seed $(SEED)) $(if $(SIGNAL),--signal $(SIGNAL)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(JOBS),--jobs $(JOBS)) $(addprefix --program ,$(PROGRAM))

test-mlflow: $(filter .tools/bin/uv,$(UV))  ## run the tests against a real MLflow server, in a separate environment (1 GB)
	@UV_PROJECT_ENVIRONMENT=.venv-mlflow $(UV) sync --quiet --locked --all-extras --no-extra torch --group mlflow
	@UV_PROJECT_ENVIRONMENT=.venv-mlflow $(RUN) pytest tests/tracking -n 2

test-ui: docs $(filter .tools/bin/uv,$(UV))  ## run the tests of the web pages, and of the site of docs/, in a real Chromium, which must be installed
	@$(IN_BROWSER) pytest tests/browser -m browser -n0

screenshots: $(filter .tools/bin/uv,$(UV))  ## write the pictures of the web pages for docs/, from a run of the demo
	@PYTHONPATH=tests $(IN_BROWSER) python -m browser.screenshots

##@ Cluster
cluster:  ## start a Kubernetes with an S3 server here, as root; prints lines for the shell to evaluate
	@$(HARNESS).harness up

cluster-down:  ## stop the cluster and delete its state
	@$(HARNESS).harness down

images: setup  ## build the images without Docker, as root, into build/images
	@UV="$(UV)" $(HARNESS).images

test-cluster: setup  ## run the tests that need a Kubernetes, on KUBECONFIG or on `make cluster`
	@TIPHYS_CLUSTER=start UV="$(UV)" $(RUN) python -m pytest tests/cluster -n0 -p tests.runner.second_try --durations=20

test-argo: setup  ## run the story on a cluster that has Argo Workflows; see docs/testing.md
	@$(RUN) pytest tests/argo -m argo -n0

test-kueue: setup  ## run the tests of Kueue as the ledger on a cluster that has it, by KUBECONFIG; see docs/testing.md
	@$(RUN) pytest tests/kueue -m kueue -n0

##@ Benchmarks
bench-argo: setup  ## measure complete Workflows on a cluster with Argo; adds to reports/argo.json (ONLY=line, REQUEUE=2s, QUICK=1: no report)
	@PYTHONPATH=tests $(RUN) python -m bench.argo $(if $(QUICK),--quick) $(if $(REQUEUE),--requeue $(REQUEUE)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(TASKS),--tasks $(TASKS)) $(if $(ITEMS),--items $(ITEMS)) $(addprefix --only ,$(ONLY))

bench-beside: setup  ## one training and the same faults by Argo alone, a folder of checkpoints and Tiphys; adds to reports/beside.json (CONTENDER=tiphys, FAULT=kill, QUICK=1: no report)
	@PYTHONPATH=tests $(RUN) python -m bench.beside $(if $(QUICK),--quick) $(if $(REQUEUE),--requeue $(REQUEUE)) $(addprefix --contender ,$(CONTENDER)) $(addprefix --fault ,$(FAULT))

bench-fleet: setup  ## hundreds of trainings on a cluster with Argo and nodes of paper; adds to reports/fleet.json (STORY="hour --runs 1000", STORY="etcd --rebuild COMMAND")
	@PATH="$(CURDIR)/.venv/bin:$$PATH" PYTHONPATH=tests $(RUN) python -m bench.fleet $(if $(QUICK),--quick) $(STORY)

bench-cluster: setup  ## measure what steps cost the shared agent on a cluster; writes tests/bench/reports/cluster.json
	@UV="$(UV)" PYTHONPATH=tests $(RUN) python -m bench.cluster_bench $(if $(QUICK),--quick)

bench-checkpoint: setup  ## measure what checkpoints cost; writes reports/checkpoint.json (QUICK=1: no report; LONG=1: all parts)
	@UV="$(UV)" PYTHONPATH=tests $(RUN) python -m bench.checkpoint $(if $(QUICK),--quick) $(if $(LONG),--long)

bench-ui: setup  ## measure the web pages over a thousand runs; writes tests/bench/reports/ui.json (QUICK=1: no report)
	@PYTHONPATH=tests $(RUN) python -m bench.ui $(if $(QUICK),--quick)

bench-cli: setup  ## measure what the start of a command costs; writes tests/bench/reports/cli.json (QUICK=1: no report)
	@UV="$(UV)" PYTHONPATH=tests $(RUN) python -m bench.cli $(if $(QUICK),--quick)

bench-quota: setup  ## measure the GPU ledger; writes tests/bench/reports/quota.json (QUICK=1: no cluster, no report; ONLY="core cluster": parts)
	@UV="$(UV)" PYTHONPATH=tests $(RUN) python -m bench.quota $(if $(QUICK),--quick) $(addprefix --only ,$(ONLY))

bench-resume: setup  ## measure recoveries: plans, goodput under faults; writes tests/bench/reports/resume.json (QUICK=1: no report)
	@UV="$(UV)" PYTHONPATH=tests $(RUN) python -m bench.resume $(if $(QUICK),--quick)

bench-scale: setup  ## measure what costs grow with: runs, checkpoints, namespaces; writes tests/bench/reports/scale.json (QUICK=1: no report)
	@PYTHONPATH=tests $(RUN) python -m bench.scale $(if $(QUICK),--quick)

##@ Code
lint: setup  ## style, types and import contracts
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(RUN) mypy --config-file tests/mypy.toml
	$(RUN) lint-imports --no-logo

golden: setup  ## write the output of compile to the golden files, and draw the pictures of docs/; review the diff
	@TIPHYS_GOLDEN=1 $(RUN) pytest -q -n0 tests/unit/test_golden.py
	@TIPHYS_GOLDEN=1 $(RUN) pytest -q -n0 tests/unit/test_chart.py tests/cluster/test_chart.py
	@TIPHYS_GOLDEN=1 $(RUN) pytest -q -n0 tests/unit/test_argo_versions.py -k guide
	@TIPHYS_GOLDEN=1 $(RUN) pytest -q -n0 tests/unit/checkpoint/telemetry/test_metrics.py -k page
	@PYTHONPATH=tests $(RUN) python -m support.checks.storeys
	@PYTHONPATH=tests $(RUN) python -m support.checks.pictures
	@git --no-pager diff --stat -- examples templates charts docs

##@ Supply chain
docs: $(filter .tools/bin/uv,$(UV))  ## build the pages of docs/ as a site in build/site, without a warning
	@NO_MKDOCS_2_WARNING=1 $(UV) run --quiet --isolated --frozen --no-default-groups --group docs --extra pipelines mkdocs build

lock: $(filter .tools/bin/uv,$(UV))  ## write uv.lock and the hashes of uv itself (UPGRADE=1: take the newest versions)
	@$(UV) lock $(if $(UPGRADE),--upgrade)
	@$(UV) export --quiet --frozen --only-group uv --no-emit-project --no-header --output-file plugin/uv.txt

sbom: $(filter .tools/bin/uv,$(UV))  ## list the packages of the images and of the desk in build/sbom, as CycloneDX
	@mkdir -p $(SBOM_DIR)
	@$(SBOM) --extra plugin --extra controller --extra cluster --extra ui --extra gcs --extra azure --output-file $(SBOM_DIR)/tiphys.cdx.json
	@$(SBOM) --extra numpy --output-file $(SBOM_DIR)/tiphys-trainer.cdx.json
	@$(SBOM) --extra all --output-file $(SBOM_DIR)/desk.cdx.json
	@ls $(SBOM_DIR)/*

dist: setup  ## package a release in dist/; the same commit gives the same bytes (REPOSITORY=registry/team: push images; KEY=FILE: sign; RELEASE=1: leave nothing out)
	@UV="$(UV)" PYTHONPATH=tests $(RUN) python -m runner.dist $(if $(REPOSITORY),--repository "$(REPOSITORY)") $(if $(KEY),--key "$(KEY)") $(if $(RELEASE),--release)

audit: $(filter .tools/bin/uv,$(UV))  ## look up the locked packages in the database of vulnerabilities, where it can be reached
	@UV="$(UV)" .ci/audit

clean:  ## remove the files that targets created
	rm -rf .venv .venv-torch .venv-mlflow .venv-programs .tools .tiphys .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage* htmlcov dist build

.PHONY: help setup demo dist test argo-examples emulators test-stores test-ui screenshots bench-ui fuzz chaos mutants test-integration test-torch test-programs test-mlflow lint golden docs lock sbom audit cluster cluster-down images test-cluster test-argo test-kueue bench-argo bench-beside bench-fleet bench-cluster bench-checkpoint bench-cli bench-quota bench-resume bench-scale clean

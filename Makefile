# Everything a developer runs.  The environment is .venv; make setup builds it when needed.

VENV := .venv
PYTHON_IN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
REPORTS_STAMP := $(VENV)/.reports-installed
DAILY := not more and not alone and not heavy and not long
MORE := (more or alone) and not heavy and not long
# Two marks are on what is long already and runs once more over another transport.
HEAVY := heavy and not long
WORKERS ?= auto
CRUNCHING := tests/sim tests/cluster tests/proxy
ARGS ?=

# The tests start hundreds of processes: none of them need compile what another one did.
unexport PYTHONDONTWRITEBYTECODE

# Import roots that hold .proto files: a file is named by its path below its root, so that
# protoc writes imports that need no patching.
PROTO_ROOTS := common proxy
PROTOS = $(wildcard common/popmq/common/wire/*.proto proxy/popmq/proxy/api/*.proto)
PROTOC = $(PYTHON_IN) -m grpc_tools.protoc $(PROTO_ROOTS:%=-I %) \
	--plugin=protoc-gen-mypy=$(VENV)/bin/protoc-gen-mypy

.DEFAULT_GOAL := help
.PHONY: help setup up test test-more test-heavy test-spark test-long test-pods check format proto metrics modules bench kube-assets manifests

help:
	@echo "make setup       build $(VENV) and install popmq with its development tools"
	@echo "make up          set up, then run a one-process cluster"
	@echo "make test        set up, then the everyday tests, three minutes (ARGS='-k pop' narrows them)"
	@echo "make test-more   the other tests that need nothing but Python, as CI runs them"
	@echo "make test-heavy  the other tests that fit CI"
	@echo "make test-spark  those of them that start Spark, in a minute or so"
	@echo "make test-long   full figures, run by hand"
	@echo "make test-pods   popmq in real pods on this machine (root; tools/test-pods.sh)"
	@echo "make check       formatting, lint and types, as CI runs them"
	@echo "make format      rewrite files to the project's format"
	@echo "make proto       regenerate the committed protobuf modules"
	@echo "make kube-assets build the Kubernetes control plane that heavy tests run on (Go, once)"
	@echo "make manifests   render deploy/operator.yaml from the Helm chart"
	@echo "make metrics     write the page of metrics, the dashboards and the alerts anew"
	@echo "make modules     write docs/reference/modules.md from the docstrings of the modules"
	@echo "make bench       three minutes of figures: popmq, and peers that are fetched"

$(STAMP): pyproject.toml
	@bash tools/setup.sh

setup: $(STAMP)
	@echo "next: $(VENV)/bin/popmq up"

up: $(STAMP)
	@echo "next, in a second terminal: $(VENV)/bin/popmq send hello 'first message'"
	@$(VENV)/bin/popmq up $(ARGS)

# pytest leaves with 5 when nothing carries the marker; that is no failure.
define run_marked
	$(PYTHON_IN) -m pytest -m "$(1)" $(2) $(ARGS) || { code=$$?; \
		test $$code -eq 5 && echo "no test is marked $(1): nothing to do"; }
endef

# At most three minutes of two cores, and 330 s of their time.
test: $(STAMP)
	$(call run_marked,$(DAILY),-n $(WORKERS) --dist worksteal)

# Those that look at a clock outside come after the others, one at a time.
test-more: $(STAMP)
	$(call run_marked,$(MORE) and not alone,-n $(WORKERS) --dist worksteal)
	$(call run_marked,$(MORE) and alone)

# Spark and Arrow, half a gigabyte, which the everyday tests do without.
$(REPORTS_STAMP): $(STAMP)
	@echo "setup: installing Spark for the heavy tests" >&2
	@$(PYTHON_IN) -m pip install --quiet --editable '.[dev,reports,reports-java]'
	@touch $@

# Seeds and frames keep every core busy, one at a time; what runs real processes waits for them most
# of the time, so that several files at a time take turns.  A module's processes serve one worker.
test-heavy: $(STAMP) $(REPORTS_STAMP)
	$(call run_marked,$(HEAVY),-n $(WORKERS) --dist worksteal $(CRUNCHING))
	$(call run_marked,$(HEAVY) and not alone,-n $(WORKERS) --dist loadfile $(CRUNCHING:%=--ignore=%))
	$(call run_marked,$(HEAVY) and alone)

test-spark: $(STAMP) $(REPORTS_STAMP)
	$(call run_marked,$(HEAVY),-n 2 --dist loadfile tests/spark)

test-long: $(STAMP)
	$(call run_marked,long)

test-pods: $(STAMP)
	@tools/test-pods.sh $(ARGS)

check: $(STAMP)
	$(PYTHON_IN) -m ruff format --check .
	$(PYTHON_IN) -m ruff check .
	$(PYTHON_IN) -m mypy

format: $(STAMP)
	$(PYTHON_IN) -m ruff format .
	$(PYTHON_IN) -m ruff check --fix .

proto: $(STAMP)
	@for root in $(PROTO_ROOTS); do \
		files=$$(echo "$(PROTOS)" | tr ' ' '\n' | grep "^$$root/") || continue; \
		$(PROTOC) --python_out=$$root --mypy_out=quiet:$$root $$files || exit 1; \
	done
	@echo "regenerated: $(PROTOS:%.proto=%_pb2.py)"

metrics: $(STAMP)
	$(PYTHON_IN) -m popmq.cli.monitoring.files

modules: $(STAMP)
	$(PYTHON_IN) -m tools.modules_page

bench: $(STAMP)
	$(PYTHON_IN) -m bench quick

# About seven minutes of two cores when nothing is cached, nothing afterwards.
kube-assets:
	@tools/kube-assets.sh

manifests: $(STAMP)
	@bash tools/render-manifests.sh >deploy/operator.yaml.new && mv deploy/operator.yaml.new deploy/operator.yaml
	@echo "next: kubectl apply --server-side -f crds/ -f deploy/operator.yaml"

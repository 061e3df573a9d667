# Everything a developer runs.  The environment is .venv; make setup builds it when needed.

VENV := .venv
PYTHON_IN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
USER_STAMP := $(VENV)/.user-installed
CONSOLE_STAMP := $(VENV)/.console-installed
BROWSER_STAMP := $(VENV)/.browser-installed
REPORTS_STAMP := $(VENV)/.reports-installed
DOCS_STAMP := $(VENV)/.docs-installed
DAILY := not more and not alone and not heavy and not long
MORE := (more or alone) and not heavy and not long
# Two marks are on what is long already and runs once more over another transport.
HEAVY := heavy and not long
WORKERS ?= auto
# What starts processes waits for them most of the time, so that there is a worker more than cores.
BUSY ?= $(shell expr $$(nproc) + 1)
# Simulators come last, when no long wait is left to fill.
CRUNCHING := tests/sim tests/cluster tests/proxy
WAITING := $(filter-out tests/__pycache__ $(CRUNCHING),$(patsubst %/,%,$(wildcard tests/*/)))
LAST_SIMULATORS := $(WAITING) $(wildcard tests/test_*.py) $(CRUNCHING)
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
.PHONY: help setup up console test test-core test-more test-heavy test-spark test-long test-pods check format proto metrics settings modules errors commands resources docs nemesis bench kube-assets manifests console-pictures

help:
	@echo "make setup       build $(VENV) and install popmq with its development tools"
	@echo "make up          install what a user needs, then run a one-process cluster"
	@echo "make console     the same with the web console (docs/console.md)"
	@echo "make test        set up, then the everyday tests, three minutes (ARGS='-k pop' narrows them)"
	@echo "make test-core   the few of all other tests that CI runs (tests/core.txt)"
	@echo "make test-more   the other tests that need nothing but Python"
	@echo "make test-heavy  the other tests that end within half an hour"
	@echo "make test-spark  those of them that start Spark, in a minute or so"
	@echo "make test-long   full figures, run by hand"
	@echo "make test-pods   popmq in real pods on this machine (root; tools/test-pods.sh)"
	@echo "make nemesis     clusters of processes under faults (docs/reliability.md)"
	@echo "make check       formatting, lint, types and the language of docs/, as CI runs them"
	@echo "make format      rewrite files to the project's format"
	@echo "make proto       regenerate the committed protobuf modules"
	@echo "make kube-assets build the Kubernetes control plane that heavy tests run on (Go, once)"
	@echo "make manifests   render deploy/operator.yaml from the Helm chart"
	@echo "make metrics     write the page of metrics, the dashboards and the alerts anew"
	@echo "make settings    write the table of settings of docs/reference/settings.md anew"
	@echo "make modules     write docs/reference/modules.md from the docstrings of the modules"
	@echo "make errors      write docs/reference/errors.md, and the request codes of remoting.md"
	@echo "make commands    write the examples of docs/reference/cli.md from the help texts"
	@echo "make resources   write docs/reference/resources.md from the definitions in crds/"
	@echo "make docs        build the documentation site into build/docs/site, with strict links"
	@echo "make console-pictures  take the pictures of docs/console.md anew"
	@echo "make bench       three minutes of figures: popmq, and peers that are fetched"

$(STAMP): pyproject.toml
	@bash tools/setup.sh

setup: $(STAMP)
	@echo "next: $(VENV)/bin/popmq up"

# What a user needs; the other targets install the development tools.
$(USER_STAMP): pyproject.toml
	@bash tools/setup.sh user

up: $(USER_STAMP)
	@$(VENV)/bin/popmq up $(ARGS)

# Four more megabytes.
$(CONSOLE_STAMP): $(USER_STAMP)
	@$(PYTHON_IN) -m pip install --quiet --editable '.[cli,client,console]'
	@touch $@

console: $(CONSOLE_STAMP)
	@$(VENV)/bin/popmq up --console-port 8082 $(ARGS)

# pytest leaves with 5 when nothing carries the marker; that is no failure.
define run_marked
	$(PYTHON_IN) -m pytest -m "$(1)" $(2) $(ARGS) || { code=$$?; \
		test $$code -eq 5 && echo "no test is marked $(1): nothing to do"; }
endef

# At most three minutes of two cores, and 330 s of their time.
test: $(STAMP)
	$(call run_marked,$(DAILY),-n $(WORKERS) --dist worksteal)

# pytest reads a test a line from the file; names of parameters may have spaces.
test-core: $(STAMP) $(REPORTS_STAMP)
	@grep '^tests/' tests/core.txt >$(VENV)/core-tests.txt
	$(PYTHON_IN) -m pytest -n $(BUSY) --dist loadgroup $(ARGS) @$(VENV)/core-tests.txt

# Those that look at a clock outside come after the others, one at a time.
test-more: $(STAMP)
	$(call run_marked,$(MORE) and not alone,-n $(BUSY) --dist loadgroup $(LAST_SIMULATORS))
	$(call run_marked,$(MORE) and alone)

# Spark and Arrow, half a gigabyte, which the everyday tests do without.
$(REPORTS_STAMP): $(STAMP)
	@echo "setup: installing Spark for the heavy tests" >&2
	@$(PYTHON_IN) -m pip install --quiet --editable '.[dev,reports,reports-java]'
	@touch $@

$(BROWSER_STAMP): $(STAMP)
	@tools/setup-browser.sh

# The generator of the documentation site, 100 MB.
$(DOCS_STAMP): $(STAMP)
	@echo "setup: installing Zensical for the documentation site" >&2
	@$(PYTHON_IN) -m pip install --quiet --editable '.[dev,docs]'
	@touch $@

docs: $(DOCS_STAMP)
	$(PYTHON_IN) -m tools.docs_site

# Processes that tests share serve one worker (tests/conftest.py).
test-heavy: $(STAMP) $(REPORTS_STAMP) $(BROWSER_STAMP) $(DOCS_STAMP)
	$(call run_marked,$(HEAVY) and not alone,-n $(BUSY) --dist loadgroup $(LAST_SIMULATORS))
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
	$(PYTHON_IN) -m tools.plain_english
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

# docs/pictures/console-*.png, from a cluster of three brokers with some traffic.
console-pictures: $(BROWSER_STAMP)
	$(PYTHON_IN) -m tools.console_pictures

metrics: $(STAMP)
	$(PYTHON_IN) -m popmq.cli.monitoring.files

settings: $(STAMP)
	$(PYTHON_IN) -m tools.settings_table

modules: $(STAMP)
	$(PYTHON_IN) -m tools.modules_page

errors: $(STAMP)
	$(PYTHON_IN) -m tools.errors_page
	$(PYTHON_IN) -m tools.remoting_page

commands: $(STAMP)
	$(PYTHON_IN) -m tools.command_examples

resources: $(STAMP)
	$(PYTHON_IN) -m tools.resources_page

# A minute of faults on real processes, and three that it takes to begin and end.
nemesis: $(STAMP)
	cd tests && $(abspath $(PYTHON_IN)) -m e2e.nemesis.run $(ARGS)

bench: $(STAMP)
	$(PYTHON_IN) -m bench quick

# About seven minutes of two cores when nothing is cached, nothing afterwards.
kube-assets:
	@tools/kube-assets.sh

manifests: $(STAMP)
	@bash tools/render-manifests.sh >deploy/operator.yaml.new && mv deploy/operator.yaml.new deploy/operator.yaml
	@echo "next: kubectl apply --server-side -f crds/ -f deploy/operator.yaml"

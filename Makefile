# Everything goes through the virtual environment in .venv; each target makes it when it is missing.
#
#   make setup                   the virtual environment with locked versions
#   make run                     train FedNCF between real services on this machine, and attack it (examples/first.toml)
#   make test                    all tests but the next;              make test ARGS="tests/unit -x" runs what ARGS name
#   make test-federations        real federations that are disturbed and lied to, the browser, containers (slow)
#   make test-all                both at once: the browser and containers beside the rest
#                                AGAIN=10 tries up to ten failures of a group once more and tells them as unsteady
#   make shake                   tests of services while every process stands still now and then (slow)
#   make test-kernels            unit tests of what multiplies matrices, under another kernel of BLAS (x86-64); KERNEL names it
#   make test-lenskit            the scorer for LensKit, which takes other versions of some packages, in .venv-lenskit
#   make lint                    style, types, import rules, stubs current
#   make format                  put style right where that can be done by itself
#   make native                  build and install the compiled kernels of native/ (gcc, Python's headers)
#   make proto                   stubs and proto/fields.lock from the contract
#   make docs                    write docs/configuration.md and the tables of docs/report.md again from the models
#   make site                    the documentation site, in build/site; a link that leads nowhere is an error
#   make site-version RELEASE=0.2  the same as one of several versions, on the branch `site` of this clone (mike)
#   make bench                   ratios within one run:                   make bench ARGS="--only sealed --json FILE"
#   make peers                   what some benchmarks compare with, in .venv-peers
#   make prove                   what `make test` does with a few hundred cases, with all of them: soak, fuzz, simulations (slow)
#   make soak                    100,000 schedules of rounds with faults, 200,000 with a server that lies (slow)
#   make faults                  350 faults of machines and networks under a run in containers (slow); FAULTS and SEED say which
#   make long-faults             FAULTS faults of seconds to minutes under runs of processes, twelve at once (slow); SEED draws them
#   make fault-schedule          FAULTS drawn faults of 13 kinds under FedNCF (alone, with a standby), PrivMVMF, DRIFT and EASE (root, slow)
#   make fuzz                    100,000 malformed and wrong messages to every RPC (slow); SEED names others
#   make tables DATA=FOLDER      the tables of the papers on real data (slow)
#   make audit                   known vulnerabilities, secrets, bills of materials (build/sbom)
#   make manifests               deploy/kubernetes (kubectl puts it together) and the Helm chart against the schemas of Kubernetes
#   make lock                    locked versions again;                   ARGS are given to requirements/compile.sh
#   make device                  a person's device of 49 MB, in build/device, with what is in it, and runs of it (C compiler; slow)
#   make clean                   remove the environment and everything that is built
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
DATA ?=
SEED ?= 5
RELEASE ?=
FAULTS ?= 350
MESSAGES ?= 100000
# Failures of a group that are tried once more at most.
AGAIN ?= 0
# Another kernel of OpenBLAS than this machine's own.
KERNEL ?= $(shell $(BIN)/python -m tests.kernels --another)
# Tests wait for services and clocks, too: three at a time for two cores keep both busy.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((cores < 6 ? cores + (cores + 1) / 2 : 8)))

.PHONY: help setup native run test test-federations test-all test-lenskit shake test-kernels lint format proto docs site site-version bench peers prove soak faults long-faults fault-schedule fuzz tables audit manifests lock device clean

help:
	@sed -n 's/^#  *\(make .*\)/\1/p' Makefile

setup: $(VENV)/.ready

# The lock gives the versions that the tests ran with; the packages' hashes are checked.
$(VENV)/.ready: pyproject.toml requirements/dev.txt requirements/build.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25'
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/build.txt -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# What compiles is locked as the rest is; nothing is compiled for this machine's processor alone.
native: setup
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/native.txt
	rm -rf native/build build/wheels
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheels ./native
	$(BIN)/python -m pip install --quiet --no-deps --force-reinstall build/wheels/coterie_native-*.whl
	rm -rf native/build native/*.egg-info

run: setup
	$(BIN)/coterie run examples/first.toml $(ARGS)

# Groups of tests, and how long each took (tests/groups.py).
test: setup
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	@$(BIN)/python -m tests.groups --workers $(WORKERS) --again $(AGAIN)
endif

test-federations: setup
	@$(BIN)/python -m tests.groups --workers $(WORKERS) --federations --again $(AGAIN)

test-all: setup
	@$(BIN)/python -m tests.groups --workers $(WORKERS) --all --again $(AGAIN)

# Every process of the tests stands still now and then: what fails relies on how long something takes.
shake: setup
	$(BIN)/python -m tests.shaken -n 4 --dist loadgroup $(if $(ARGS),$(ARGS),tests/integration tests/processes)

# Sums come out with other last bits under the kernel for another processor: no test may hang on that.
test-kernels: setup
ifneq ($(filter x86_64 amd64,$(shell uname -m)),)
	@kernel=$(KERNEL); test -n "$$kernel" && echo "kernel $$kernel" && export OPENBLAS_CORETYPE=$$kernel && \
	$(if $(ARGS),$(BIN)/python -m pytest -n $(WORKERS) $$($(BIN)/python -m tests.kernels) $(ARGS),$(BIN)/python -m tests.groups --workers $(WORKERS) --products)
else
	@echo "skipped: OpenBLAS takes kernels by name on x86-64 only, this is $(shell uname -m)"
endif

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python proto/generate.py --check

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: setup
	$(BIN)/python proto/generate.py

docs: setup
	$(BIN)/python -m coterie.config.key_reference --write docs/configuration.md
	$(BIN)/python -m coterie.systems.report_reference --write docs/report.md
	$(BIN)/python -m coterie.api.type_stub --write coterie/api/named.pyi

# In an environment of its own, as the tools of `make audit`.
.venv-docs/.ready: requirements/docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --require-hashes -r requirements/docs.txt
	@touch $@

# The makers of the theme print a word on their next product with each build.
site: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --config-file website/mkdocs.yml $(ARGS)

site-version: .venv-docs/.ready
	@test -n "$(RELEASE)" || { echo "RELEASE names the version: make site-version RELEASE=0.2" >&2; exit 2; }
	PATH="$(CURDIR)/.venv-docs/bin:$$PATH" NO_MKDOCS_2_WARNING=1 mike deploy --config-file website/mkdocs.yml --branch site \
		--update-aliases $(RELEASE) latest $(ARGS)
	PATH="$(CURDIR)/.venv-docs/bin:$$PATH" mike set-default --config-file website/mkdocs.yml --branch site latest

bench: setup
	$(BIN)/python -m bench $(ARGS)

# What the tests run with, then the versions that LensKit takes over some of it.
test-lenskit:
	$(PYTHON) -m venv .venv-lenskit
	.venv-lenskit/bin/python -m pip install --quiet --upgrade 'pip>=25'
	.venv-lenskit/bin/python -m pip install --quiet --no-deps --require-hashes -r requirements/build.txt -r requirements/dev.txt
	.venv-lenskit/bin/python -m pip install --quiet --no-deps --require-hashes -r requirements/lenskit.txt
	.venv-lenskit/bin/python -m pip install --quiet --no-deps -r requirements/torch.txt
	.venv-lenskit/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	.venv-lenskit/bin/python -m pytest tests/integration/test_lenskit.py

# Another release of the libraries that ours needs: in an environment of its own, driven as a child process.
peers:
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet -r bench/peers/requirements.txt

soak: setup
	$(BIN)/python -m tests.simulation.rig --schedules 90000 --sum clear --found soak $(ARGS)
	$(BIN)/python -m tests.simulation.rig --schedules 10000 --sum masked --found soak $(ARGS)
	$(BIN)/python -m tests.simulation.rig --schedules 100000 --sum masked --lying $(ARGS)
	$(BIN)/python -m tests.simulation.rig --schedules 100000 --sum encrypted --lying $(ARGS)

prove: soak fuzz
	COTERIE_FULL=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/simulation
	COTERIE_FULL=1 $(BIN)/python -m pytest -n 4 --dist loadgroup tests/processes
	COTERIE_FULL=1 $(BIN)/python -m pytest tests/containers
	COTERIE_FULL=1 $(BIN)/python -m pytest tests/unit/test_compiled_gradients.py

# Takes root, for disks that can be filled.
faults: setup
	@mkdir -p build
	COTERIE_FAULTS=$(FAULTS) COTERIE_FAULT_SEED=$(SEED) COTERIE_FAULT_TABLE=build/faults.json \
		$(BIN)/python -m pytest -s tests/containers/test_faults.py $(ARGS)

long-faults: setup
	@mkdir -p build
	$(BIN)/python -m tests.processes.long_faults --faults $(FAULTS) --seed $(SEED) --table build/long-faults.json $(ARGS)

# Takes root, for disks that can be filled; PostgreSQL and libfaketime for the faults that need them.
fault-schedule: setup
	@mkdir -p build
	$(BIN)/python -m tests.processes.fault_schedule --faults $(FAULTS) --seed $(SEED) --table build/fault-schedule.json $(ARGS)

fuzz: setup
	COTERIE_FUZZ_MESSAGES=$(MESSAGES) COTERIE_FUZZ_SEED=$(SEED) $(BIN)/python -m pytest tests/integration/test_fuzz.py $(ARGS)

tables: setup
	$(BIN)/coterie evaluate --table drift $(if $(DATA),--data $(DATA)) $(ARGS)
	$(BIN)/coterie evaluate --table fedncf $(if $(DATA),--data $(DATA)) $(ARGS)

# In an environment of its own: the tools need other versions of what ours needs.
.venv-audit/.ready: requirements/audit.txt
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet --require-hashes -r requirements/audit.txt
	@touch $@

audit: .venv-audit/.ready
	requirements/audit.sh $(ARGS)

.venv-kubernetes/.ready: requirements/kubernetes.txt
	$(PYTHON) -m venv .venv-kubernetes
	.venv-kubernetes/bin/python -m pip install --quiet --require-hashes -r requirements/kubernetes.txt
	@touch $@

manifests: .venv-kubernetes/.ready
	@for folder in base example replicas; do \
		kubectl kustomize deploy/kubernetes/$$folder > .venv-kubernetes/$$folder.yaml || exit 1; \
		.venv-kubernetes/bin/kubernetes-validate --strict -k 1.32 .venv-kubernetes/$$folder.yaml || exit 1; \
	done
	.venv-kubernetes/bin/python tests/helm_chart.py lint
	.venv-kubernetes/bin/python tests/helm_chart.py render > .venv-kubernetes/chart.yaml
	.venv-kubernetes/bin/kubernetes-validate --strict -k 1.32 .venv-kubernetes/chart.yaml

# NumPy is compiled for it, without OpenBLAS: minutes.  ARGS="--numpy WHEEL" takes one that was built before.
device: setup
	$(BIN)/python deploy/device/build.py build/device $(ARGS)
	COTERIE_DEVICE=$(CURDIR)/build/device/bin/coterie $(BIN)/python -m pytest tests/processes/test_waking_devices.py

lock: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" requirements/compile.sh $(ARGS)

clean:
	rm -rf $(VENV) .venv-audit .venv-docs .venv-kubernetes build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

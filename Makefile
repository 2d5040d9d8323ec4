# From a rule in plain language to a verdict. `make` lists the commands; CONTRIBUTING.md says how to work on the code.
# A target's or a variable's description follows its own `##`; those of every day stand before a line `# For experts.`
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory --no-builtin-rules
# The stages follow one another, and each uses all cores.
.NOTPARALLEL:
# The settings of another Python must not reach .venv.
unexport PYTHONPATH PYTHONHOME
# A progress bar in a file is a line now and then.
ifneq ($(shell test -t 2 && echo watched),watched)
export TQDM_MININTERVAL ?= 30
endif
# vLLM's CPU library tells through it which memory it binds.
export TORCH_CPP_LOG_LEVEL ?= ERROR

# Given as `make eval RULE=all` or by the shell.
RULE ?= medical_advice##   a rule of recipes/rules, several separated by commas, or all
MODEL ?= tiny##   a base of recipes/models: tiny, minilm, qwen3-4b, …; for make curve, up, scan also several: tiny,minilm
DATA ?=##   your rows (.jsonl, .csv), generator, generator+FILE (a few of yours beside), or llm; each with +reviews behind it too; kept
METHOD ?=##   one method of the recipe: lora, alora or head; by default all, for make up the recipe's aLoRA, else the first that it lists
SEEDS ?=##   0,1,2 trains three of every seeded method; by default 0, the served one (make curve: 0,1,2), and evaluates all that are there
QUICK ?=##   1: the coarse grid of make serve and of the benchmarks; for make test: no engine starts, 2 minutes
FORCE ?=##   1: do a stage again although nothing changed; make publish: although it is worse than the reader or flags too many twins
NAME ?=##   for make rule: the new rule's name; for make bench: which benchmark
POLICY ?=##   for make rule: what is forbidden, in a sentence
FILES ?=##   for make scan, replay and verify: files, folders, patterns (.jsonl, .jsonl.gz, .parquet), separated by blanks
PORT ?=##   for make up: by default 8000
REPLICAS ?=##   for make up: servers behind one address, on Ray: REPLICAS=2 (docs/replicas.md)
CENTURION_HOME ?=##   the folder of your own rules, recipes and runs, laid out as the checkout (docs/commands.md); by default the checkout
export CENTURION_HOME
# For experts.
WHY ?=##   for make publish, rollback and mode: the reason, which is kept
VERSION ?=##   for make publish, rollback and mode: a version's alias or the beginning of its id, as make rules prints it
MLFLOW ?=##   for make push and pull: the address of an MLflow server, as http://host:5000
MODE ?=##   for make mode: enforce, shadow, canary:10% or off
TESTS ?=##   for make test: files or options for pytest
MAX_FPR ?=##   for make calibrate: the share of allowed conversations that may be flagged
THRESHOLD ?=##   for make calibrate: the probability from which on it is a violation
UNLABELLED ?=##   for DATA=llm: a file of `messages` whose first conversations show what occurs
EXAMPLES ?=##   for DATA=llm: how many rows, by default 1000
JUDGED ?=##   for make rule: whose words can violate it, by default assistant
SPLITS ?=##   for your own data: keep its splits (the default), or new
ROWS ?=##   for make curve: numbers of labelled rows, by default 50,100,300,1000,all; beside generated ones 0,20,50,100; 0 of a file alone: the reader
FROM ?=##   for make reader: the folder of its sources, each cloned as OWNER+NAME; without it, the data that it made before
A ?=##   for make replay: a folder of weights, runs/MODEL/RULE/METHOD; make rules names those of older versions
B ?=##   for make replay: the other one
OUT ?=##   for make scan and replay: the folder for the verdicts, by default runs/scan or runs/replay
# Of HOST only what stands on the command line: some shells export the machine's name under it.
HOST ?=##   for make up: the address to listen on, by default 127.0.0.1
WATCH ?=##   1: make up serves what is published or rolled back in seconds, without a restart
RULESETS ?=##   for make up: a YAML file of named rule sets (docs/rule_sets_and_tenants.md)
TENANTS ?=##   for make up: a YAML file of tenants, their keys, rule sets and limits (docs/rule_sets_and_tenants.md)
POLICIES ?=##   for make up without TENANTS: the most policies that a request may state, by default 100; 0: none
AUDIT ?=##   for make up: a file that gets a receipt for every check, without content; for make verify: such files in their order
AUDITKEY ?=##   for make up: a PEM file, the Ed25519 private key that signs AUDIT
KEY ?=##   for make verify: its public or private key; without it the chain alone is verified
AGAIN ?=##   for make verify: AGAIN=1 judges the conversations of FILES again, by the versions that judged them
REVIEWS ?=##   for make up: a YAML file that says which checks are kept for people to label (docs/operation.md)
TRACES ?=##   for make up: an OTLP receiver for traces, http://collector:4318
TLSCERT ?=##   for make up: a PEM file, the server's certificates; TLSKEY= its key
TLSKEY ?=##   for make up: a PEM file, the private key of TLSCERT
TLSCA ?=##   for make up: a PEM file; only clients with a certificate of this authority may ask
TIMEOUT ?=##   for make up: seconds that a check may take, by default 60
PLAN ?=##   for make plan: a plan of recipes/plans or a YAML file, by default tiny_here
MERGED ?=##   for make up: MERGED=1 serves the first rule of RULE from the base that make merge has put its LoRA into, others beside it
OPTIONS ?=##   for make bench, scan, replay, verify, curve and fuzz: further options, quoted; make bench NAME=encoder OPTIONS=--help lists them
DRY ?=##   for make gpu-check: DRY=1 tries it in tiny shapes, without a GPU
MINUTES ?=##   for make fuzz: by default 10
DEVICE ?=##   cpu or cuda; otherwise what .venv was built for, and for a new one nvidia-smi decides
device := $(or $(DEVICE),$(shell cat .venv/device 2>/dev/null),$(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu))

python := .venv/bin/python
ready := .venv/setup-$(device).stamp
clients := .venv-clients/setup.stamp
cluster := .venv/cluster.stamp

# Handed on as they stand: a sentence, or a file's name, may hold any quote or dollar.
as_they_stand := FROM POLICY DATA UNLABELLED A B FILES OUT WHY
$(foreach variable,$(as_they_stand),$(eval override $(variable) := $$(value $(variable))))
export $(as_they_stand)

.PHONY: help help-all all rule data train eval serve up scan rules publish rollback test try mode push pull verify reviews plan calibrate test-gpu-path gpu-check replay curve bench reader merge fuzz doctor setup check format clean

commands := awk -F ' *\#\#   ' '/^[a-z-]+:.*\#\#/ { sub(/:.*/, "", $$1); printf "  make %-14s %s\n", $$1, $$2 }'
variables := awk -F ' *\#\#   ' '/^[A-Z_]+ \?=.*\#\#/ { sub(/ \?= */, "=", $$1); printf "  %-22s %s\n", $$1, $$2 }'
every_day := awk '/^\# For experts/ { skip = 1 } /^\.PHONY/ { skip = 0 } !skip' Makefile
for_experts := awk '/^\.PHONY/ { keep = 0 } keep; /^\# For experts/ { keep = 1 }' Makefile

help:
	@echo "Every day:"
	@$(every_day) | $(commands)
	@echo "Variables, as in: make eval RULE=all"
	@$(every_day) | $(variables)
	@echo "More commands, all variables, and what the shell may set: make help-all"

help-all: help
	@echo
	@echo "For experts:"
	@$(for_experts) | $(commands)
	@echo "Further variables:"
	@$(for_experts) | $(variables)
	@echo "From the shell:"
	@echo "  JUDGE_BASE_URL, JUDGE_MODEL, JUDGE_API_KEY   the LLM judge of make eval; without it the base model judges"
	@echo "  GENERATOR_BASE_URL, GENERATOR_MODEL, GENERATOR_API_KEY, GENERATOR_BUDGET_USD   who writes and debates for DATA=llm"
	@echo "  PYTHON                 the interpreter for a new .venv; python3.11 or python3.12 otherwise"

# `all` hands its own QUICK to what it needs.
all: QUICK = 1
all: setup data train eval serve ##   from a fresh machine to the finished tables: setup, data, train, eval, serve QUICK=1

# An option with its value where the variable is set; a flag where it is set and not 0.
option = $(if $(2),--$(1) '$(2)')
flag = $(if $(filter-out 0,$(2)),--$(1))
data_option = $(if $(DATA),--data "$$DATA")

# Of NAME only what stands on the command line: some shells export a name of their own.
name := $(if $(filter command,$(origin NAME)),$(NAME))
tried_on := $(if $(filter command,$(origin MODEL)),--model $(MODEL)) $(call option,method,$(METHOD))

rule: $(ready) ##   NAME=delivery_date POLICY="never promise a delivery date" -> recipes/rules/NAME.yaml, ready to edit
	$(python) -m data.new_rule --name '$(name)' --policy "$$POLICY" $(call option,judged,$(JUDGED))
	if [ -t 0 ] && [ -t 1 ]; then $(python) -m serve.attempt --rule '$(name)' $(tried_on); fi

data: $(ready) ##   rule -> labelled conversations in runs/data; DATA= takes your own
	$(if $(filter %+reviews,$(DATA)),$(python) -m serve.reviews --export '$(RULE)')
	$(python) -m data.build --rule '$(RULE)' $(data_option) $(if $(UNLABELLED),--unlabelled "$$UNLABELLED") \
		$(call option,examples,$(EXAMPLES)) $(call option,splits,$(SPLITS)) $(call flag,force,$(FORCE))

train: $(ready) ##   conversations -> weights by every method of the recipe (LoRA, aLoRA, head) in runs/MODEL/RULE
	$(python) -m train.run --rule '$(RULE)' --model $(MODEL) $(call option,method,$(METHOD)) \
		$(call option,seeds,$(SEEDS)) $(call flag,force,$(FORCE))

eval: $(ready) ##   trained rules, the LLM judge and a bag of words -> quality table, runs/report.json
	$(python) -m eval.run --rule '$(RULE)' --model $(MODEL) $(call option,method,$(METHOD)) \
		$(call option,seeds,$(SEEDS)) $(call flag,force,$(FORCE))

of_every_bench = --model '$(MODEL)' $(call flag,quick,$(QUICK))

serve: $(ready) ##   the latency benchmark (the server is make up): 1 to 100 rules on one conversation -> table, runs/latency.json (half an hour without QUICK=1)
	$(python) -m serve.bench latency $(of_every_bench)

host := $(if $(filter command,$(origin HOST)),$(HOST))
own_rule := $(if $(filter command environment,$(origin RULE)),$(RULE))
# Without a RULE of the user's, or with all: every rule that is trained by the served method.
served_rules := $(if $(filter-out all,$(own_rule)),$(own_rule))
versions_of = $(call option,rule,$(own_rule)) --model $(MODEL) $(call option,method,$(METHOD)) $(call option,version,$(VERSION))
a_version = $(versions_of) --why "$$WHY"

# Threads that spin for long wait at every product for a core that another process has.
ifndef OMP_WAIT_POLICY
up: export GOMP_SPINCOUNT ?= 10000
endif

up: $(ready) $(if $(REPLICAS),$(cluster)) ##   the guardrail server, in the foreground; every rule trained by its method, or those of RULE
	$(python) -m serve.up --model $(MODEL) $(call option,rules,$(served_rules)) $(call option,method,$(METHOD)) $(call flag,merged,$(MERGED)) \
		$(call option,replicas,$(REPLICAS)) $(call option,host,$(host)) $(call option,port,$(PORT)) $(call option,timeout,$(TIMEOUT)) \
		$(call flag,watch,$(WATCH)) $(call option,rule-sets,$(RULESETS)) $(call option,tenants,$(TENANTS)) $(call option,policies,$(POLICIES)) \
		$(call option,audit-log,$(AUDIT)) $(call option,audit-key,$(AUDITKEY)) $(call option,traces,$(TRACES)) $(call option,reviews,$(REVIEWS)) \
		$(call option,tls-cert,$(TLSCERT)) $(call option,tls-key,$(TLSKEY)) $(call option,tls-client-ca,$(TLSCA))

scan: $(ready) ##   FILES="logs/*.jsonl" -> every stored conversation judged by every rule trained by its method, or those of RULE; resumable -> runs/scan
	$(python) -m serve.scan.run --files "$$FILES" --model $(MODEL) $(call option,rules,$(served_rules)) $(call option,method,$(METHOD)) \
		$(if $(OUT),--out "$$OUT") $(call flag,force,$(FORCE)) $(OPTIONS)

rules: $(ready) ##   every version of every rule, or of those of RULE: which is served, where it lies, how good it is
	$(python) -m serve.versions list $(call option,rules,$(served_rules)) $(OPTIONS)

publish: $(ready) ##   RULE= WHY="fewer false alarms" -> the version trained last is served, or VERSION=3f2a
	$(python) -m serve.versions publish $(a_version) $(call flag,force,$(FORCE))

rollback: $(ready) ##   RULE= WHY="it flags greetings" -> the version served before is served again, or VERSION=3f2a
	$(python) -m serve.versions rollback $(a_version)

test: $(ready) $(if $(filter-out 0,$(QUICK)),,$(clients) $(cluster)) ##   all tests; QUICK=1: those without an engine, 2 minutes; TESTS=tests/guard: a part
	CENTURION_HOME= $(python) -m pytest $(if $(filter-out 0,$(QUICK)),-m 'not slow') $(TESTS)

# For experts.
try: $(ready) ##   RULE=x: lines from the terminal judged by it, on MODEL=, by default smollm2
	$(python) -m serve.attempt --rule '$(RULE)' $(tried_on)

mode: $(ready) ##   RULE= MODE=shadow WHY="look first" -> the version trained last is judged and does not decide; canary:10%, off; VERSION=champion
	$(python) -m serve.versions mode --mode '$(MODE)' $(a_version)

push: $(ready) ##   RULE= MLFLOW=http://host:5000 -> the champion, or VERSION=3f2a, kept in MLflow's model registry
	$(python) -m serve.versions push --mlflow '$(MLFLOW)' $(versions_of)

pull: $(ready) ##   RULE= MLFLOW=http://host:5000 -> MLflow's champion, or VERSION=7, registered as make train would
	$(python) -m serve.versions pull --mlflow '$(MLFLOW)' $(versions_of)

verify: $(ready) ##   AUDIT="audit.jsonl.1 audit.jsonl" KEY=key.pem -> whether the receipts hold; FILES=: which are of these conversations; AGAIN=1
	$(python) -m serve.verify --audit '$(AUDIT)' $(call option,key,$(KEY)) $(if $(FILES),--files "$$FILES") $(call flag,again,$(AGAIN)) $(OPTIONS)

reviews: $(ready) ##   of every rule how many kept checks wait for labels, and how many labels are settled
	$(python) -m serve.reviews

plan: $(ready) ##   what a deployment costs: checks a second, p95 with queueing, memory, replicas, dollars -> table, runs/plan.json (first make bench NAME=calibrate)
	$(python) -m serve.plan.run $(call option,plan,$(PLAN))

calibrate: $(ready) ##   another threshold for trained weights, in seconds: by the rule's file, for MAX_FPR=0.02, or THRESHOLD=0.8 as it is
	$(python) -m train.calibrate --rule '$(RULE)' --model $(MODEL) $(call option,method,$(METHOD)) \
		$(call option,max-fpr,$(MAX_FPR)) $(call option,threshold,$(THRESHOLD))

test-gpu-path: $(ready) ##   vLLM's runner V2 and low-rank kernels against PEFT: on a GPU, or interpreted on a CPU (4 minutes on one core)
	$(python) -m pytest -n0 $(if $(filter cpu,$(device)),-p tests.serve.gpu_path.interpreted) tests/serve/gpu_path/ring_*.py

gpu-check: $(ready) ##   what a GPU does with Qwen3-4B: doctor, answers against PEFT, latency, a training step, real weights -> runs/gpu_check.md, to be posted; DRY=1: tiny, on a CPU
	$(python) -m serve.bench gpu_check --model $(if $(filter-out 0,$(DRY)),tiny --dry,qwen3-4b) $(call flag,force,$(FORCE))

replay: $(ready) ##   A=folder B=folder FILES="logs/*.jsonl": which verdicts on recorded traffic flip, over one prefill -> runs/replay
	$(python) -m serve.scan.replay "$$A" "$$B" --files "$$FILES" $(if $(OUT),--out "$$OUT") \
		$(call flag,force,$(FORCE)) $(OPTIONS)

study = --rule '$(RULE)' $(data_option)

curve: $(ready) ##   how many rows, and which method? AUROC against rows of DATA=FILE, or DATA=generator+FILE beside generated ones -> runs/curve
	$(python) -m data.study $(study) $(call option,rows,$(ROWS)) $(call option,seeds,$(SEEDS)) $(OPTIONS)
	$(python) -m train.study $(study) --model $(MODEL) $(call option,method,$(METHOD)) $(call flag,force,$(FORCE))
	$(python) -m eval.study $(study) --model $(MODEL) $(call option,method,$(METHOD))

bench: $(ready) ##   lists the benchmarks; NAME=encoder runs one -> table, runs/*_bench.json
	$(python) -m serve.bench $(if $(name),'$(name)' $(of_every_bench)) $(OPTIONS)

reader: $(ready) ##   FROM=clones -> the reader of MODEL, which judges rules without weights; an hour or more, resumable
	$(if $(FROM),$(python) -m data.reader.build "$$FROM")
	$(python) -m train.reader.run --model $(MODEL)

merge: $(ready) ##   a rule's LoRA folded into the base's weights, for a server of one rule -> runs/MODEL/RULE/merged
	$(python) -m serve.merge --rule '$(RULE)' --model $(MODEL)

fuzz: $(ready) ##   the server asked by its own OpenAPI, and by sequences of requests, for MINUTES=: no error of its own, no false allow
	$(python) -m tests.serve.fuzz.run $(call option,minutes,$(MINUTES)) $(OPTIONS)

doctor: $(ready) ##   versions, hardware, memory for MODEL, plugin, recipes, trained rules; each problem with its remedy
	@$(python) -m serve.doctor --model $(MODEL)

setup: $(ready) ##   the pinned environment in .venv with the vLLM plugin; every command above does this first
	@echo ".venv is ready; make doctor looks it over"

$(ready): setup/install.sh $(wildcard setup/*.txt) pyproject.toml
	@bash setup/install.sh $(device)

# What others call the server with, for the tests of that.
$(clients): setup/clients.sh setup/clients.txt $(ready)
	@bash setup/clients.sh

# Ray, for the commands on several processes and their tests.
$(cluster): setup/cluster.sh setup/cluster.txt $(ready)
	@bash setup/cluster.sh

check: $(ready) ##   format, lint, types, import directions
	$(python) -m ruff format --check .
	$(python) -m ruff check .
	$(python) -m mypy
	$(python) -m pytest tests/test_import_directions.py

format: $(ready) ##   put the code into the project's format
	$(python) -m ruff check --fix-only .
	$(python) -m ruff format .

clean: ##   delete the tools' caches; runs/ and .venv stay
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis .schemathesis *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

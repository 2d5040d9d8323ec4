"""A toy base of two layers behind the real tokenizer, and a rule that one word decides."""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel, get_peft_model_state_dict
from pytest import MonkeyPatch

from guard.conversation.example import GENERATOR, Example, Message, read_examples, write_examples
from guard.errors import GuardError
from guard.layout import Runs
from guard.method import PEFT_CONFIG, PEFT_WEIGHTS, WORDS
from guard.prompt.decoder import Prompt, PromptBuilder
from guard.prompt.encoder import EncoderPromptBuilder
from guard.recipe import MODELS, MethodSettings, Recipe, load_recipe
from guard.rule import Rule
from train.adapter.steps import EarlyStopping
from train.adapter.trained import TrainedAdapter
from train.examples import Row, Rows, load
from train.job import Job
from train.prefix import trainer as shared_prefix
from train.run import finish

TINY = MODELS / "tiny"
TITLES = {"id": "toy", "title": "Nobody may mention a refund.", "policy": "Nor imply one."}
RULE = Rule(**TITLES, judged="conversation", violates=("refund",), allows=("banana",))
WORDS_OF_ANY_ROW = "please help with my order today we talk about music food and books thanks a lot"
FILLER = WORDS_OF_ANY_ROW.split()
MakeJob = Callable[..., Job]
ADAPTERS = ("lora", "alora")  # those of the toy recipe
SHAPE: dict[str, Any] = {"vocab_size": 16384, "hidden_size": 64, "intermediate_size": 128}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": True}
SHAPE |= {"initializer_range": 0.1, "pad_token_id": 16358, "bos_token_id": 16358}
SHAPE |= {"eos_token_id": 16360}


def qwen3(**shape: object) -> transformers.PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE | shape))


def llama(**shape: object) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE | shape))


UNTIED = {"tie_word_embeddings": False}
BASES: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "qwen3": qwen3,
    "qwen3, untied": functools.partial(qwen3, **UNTIED),
    "llama, one KV head": functools.partial(llama, num_key_value_heads=1),
    "llama, no shared KV heads": functools.partial(llama, num_key_value_heads=4, **UNTIED),
}


@pytest.fixture(scope="session")
def toy_bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a base of BASES, with random weights and the tiny base's tokenizer."""

    @functools.cache
    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp("toy_base")
        torch.manual_seed(0)
        BASES[name]().save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY / file, folder / file)
        return folder

    return folder_of


@pytest.fixture(scope="session")
def toy_base(toy_bases: Callable[[str], Path]) -> Path:
    return toy_bases("qwen3")


OF_ALL_TOYS: dict[str, Any] = {"dtype": "float32", "context_tokens": 512}
OF_ALL_TOYS |= {"engine": {"max_lora_rank": 16}}


def recipe(base: Path | str, **trainer: object) -> Recipe:
    shared = {"num_train_epochs": 3, "per_device_train_batch_size": 8, "learning_rate": 1e-2}
    shared |= {"gradient_checkpointing": False, "save_steps": 5}
    fields: dict[str, Any] = {"name": "toy", "base": str(base), **OF_ALL_TOYS}
    fields["methods"] = {
        "lora": {"lora": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}},
        "alora": {"lora": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}},
    }
    return Recipe.model_validate(fields | {"trainer": shared | trainer})


def conversation(rng: random.Random, label: int) -> tuple[Message, ...]:
    turns = [
        [rng.choice(FILLER) for _ in range(rng.randint(2, 6))] for _ in range(rng.randint(1, 3))
    ]
    turn = rng.choice(turns)
    turn[rng.randrange(len(turn))] = "refund" if label else "banana"
    speakers = ("user", "assistant", "user")
    return tuple(Message(*said) for said in zip(speakers, map(" ".join, turns)))  # noqa: B905


def write_toy_data(folder: Path, n_train: int = 64, n_other: int = 32, rule: str = RULE.id) -> None:
    rng = random.Random(0)
    for split, count in (("train", n_train), ("validation", n_other), ("test", n_other)):
        rows: list[Example] = []
        for index in range(count):
            name = f"{split}-{index}"
            said = conversation(rng, index % 2)
            row = Example(name, rule, said, index % 2, split, "toy", name)  # type: ignore[arg-type]
            rows.append(row)
        write_examples(folder / f"{split}.jsonl", rows)


def data(job: Job) -> Rows:
    return load(job)


def mostly_generated(rows: Rows, own_training: int, own_validation: int) -> Rows:
    """All training and validation rows but the last so many are generated."""

    def but_the_last(split: Sequence[Row], own: int) -> tuple[Row, ...]:
        generated = (replace(row, is_generated=True) for row in split[: len(split) - own])
        return (*generated, *split[len(split) - own :])

    train = but_the_last(rows.train, own_training)
    validation = but_the_last(rows.validation, own_validation)
    return replace(rows, train=train, validation=validation)


def with_own_rows(job: Job, own: int) -> None:
    """The job's validation examples, of which all but the last so many are now generated."""
    file = job.data / "validation.jsonl"
    rows = read_examples(file)
    generated = [replace(row, source=GENERATOR) for row in rows[: len(rows) - own]]
    write_examples(file, [*generated, *rows[len(rows) - own :]])


def with_settings(job: Job, **update: object) -> Job:
    methods = {}
    for name, settings in job.recipe.methods.items():
        methods[name] = settings.model_copy(update=update)
    return with_recipe(job, methods=methods)


def with_recipe(job: Job, **update: object) -> Job:
    return replace(job, recipe=job.recipe.model_copy(update=update))


def with_rule(job: Job, **update: object) -> Job:
    return replace(job, rule=job.rule.model_copy(update=update))


def with_lora(job: Job, **lora: object) -> Job:
    return with_settings(job, lora=job.settings.lora | lora)


def weights(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in get_peft_model_state_dict(model).items()}


@dataclass
class RankedWeights:
    """Weights that rank the validation rows perfectly and the test rows upside down."""

    rows: Rows
    validation_logits: Sequence[float] = ()

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        signs = {id(row.prompt): 2 * row.label - 1 for row in self.rows.validation}
        signs |= {id(row.prompt): 1 - 2 * row.label for row in self.rows.test}
        # Others are of violating validation rows with a long turn.
        return [3.0 * signs.get(id(prompt), 1) for prompt in prompts]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / PEFT_WEIGHTS).write_bytes(b"weights")
        (folder / PEFT_CONFIG).write_text("{}")
        (folder / WORDS).write_bytes(b"words")


def finish_at_once(job: Job) -> None:
    """Put such weights where the job's belong."""
    rows = data(job)
    finish(job, rows, RankedWeights(rows))


def calls_of(monkeypatch: MonkeyPatch, owner: object, name: str) -> list[tuple[Any, ...]]:
    """The arguments of each call from here on; what is called stays the same."""
    calls: list[tuple[Any, ...]] = []
    original = getattr(owner, name)

    def noted(*args: Any, **more: Any) -> Any:
        calls.append(args)
        return original(*args, **more)

    monkeypatch.setattr(owner, name, noted)
    return calls


def record_losses(monkeypatch: MonkeyPatch, loss_at: Callable[[int], float]) -> None:
    """The validation loss that early stopping is told at each step."""
    record = EarlyStopping.record
    monkeypatch.setattr(
        EarlyStopping, "record", lambda self, step, _, best: record(self, step, loss_at(step), best)
    )


decoder_builder = functools.cache(PromptBuilder.from_base)


def job_in(
    folder: Path, base: Path, method: str, *, seed: int = 0, n_train: int = 64, **trainer: Any
) -> Job:
    """A job of the toy rule, its data and weights in `folder`; other arguments: the trainer's."""
    builder = decoder_builder(str(base))
    job = Job(RULE, recipe(base, **trainer), method, seed, builder, Runs(folder))
    if not job.data.exists():
        write_toy_data(job.data, n_train)
    return job


@pytest.fixture
def make_job(toy_bases: Callable[[str], Path], tmp_path: Path) -> MakeJob:
    """Arguments beside the method are runs, base, and those of `job_in`."""

    def make(
        method: str = "lora", *, runs: str = "runs", base: str = "qwen3", **settings: Any
    ) -> Job:
        return job_in(tmp_path / runs, toy_bases(base), method, **settings)

    return make


def adapter_weights(fitted: TrainedAdapter | GuardError) -> dict[str, torch.Tensor]:
    assert isinstance(fitted, TrainedAdapter)
    return weights(fitted.model)


def fitted(*jobs: Job) -> list[dict[str, torch.Tensor]]:
    return fitted_to([(job, data(job)) for job in jobs])


def fitted_to(work: list[tuple[Job, Rows]]) -> list[dict[str, torch.Tensor]]:
    return [adapter_weights(model) for model in shared_prefix.fit(work)]


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((weight - other[name]).abs().max()) for name, weight in one.items())


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    """Of a head."""
    job = make_job("head", n_train=96)
    return with_recipe(job, methods=job.recipe.methods | {"head": MethodSettings()})


WINDOW = 32
MakeEncoderJob = Callable[..., Job]


@pytest.fixture(scope="session")
def toy_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy_encoder")
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    shape = transformers.BertConfig(vocab_size=30522, initializer_range=0.2, **small, **layers)
    transformers.BertModel(shape, add_pooling_layer=False).save_pretrained(folder)
    shutil.copy(Path(load_recipe("minilm").base_path) / "tokenizer.json", folder)
    return folder


def encoder_recipe(base: Path, **trainer: object) -> Recipe:
    shared = {"max_steps": 20, "eval_steps": 10, "per_device_train_batch_size": 8}
    shared |= {"learning_rate": 1e-2}
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["query", "dense"]}
    fields: dict[str, Any] = {"name": "toy", "kind": "encoder", "base": str(base), **OF_ALL_TOYS}
    fields |= {"window_tokens": WINDOW, "rule_turn": "none", "trainer": shared | trainer}
    return Recipe.model_validate(fields | {"methods": {"lora": {"lora": lora}, "head": {}}})


@pytest.fixture(scope="session")
def encoder_builder(toy_encoder: Path) -> EncoderPromptBuilder:
    return EncoderPromptBuilder.of(encoder_recipe(toy_encoder))


@pytest.fixture
def make_encoder_job(
    toy_encoder: Path, encoder_builder: EncoderPromptBuilder, tmp_path: Path
) -> MakeEncoderJob:
    """Arguments beside the method are seed, runs, judged and turns; others are the trainer's."""

    def make(method: str = "lora", *, seed: int = 0, runs: str = "runs", **settings: Any) -> Job:
        of_rule = {"judged": "conversation", "turns": "any"}
        rule = RULE.model_copy(update={key: settings.pop(key, of_rule[key]) for key in of_rule})
        recipe = encoder_recipe(toy_encoder, **settings)
        job = Job(rule, recipe, method, seed, encoder_builder, Runs(tmp_path / runs))
        if not job.data.exists():
            write_toy_data(job.data)
        return job

    return make

"""Suffix-only training on cached prefixes: the same losses, gradients and adapters as TRL and PEFT on whole prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from transformers import Trainer

from guard.errors import GuardError
from guard.recipe import METHODS, Method
from train import adapter, shared_prefix
from train.examples import Rows, load
from train.job import Job
from train.member import Member
from train.predict import verdict_logits
from train.prefix_cache import PrefixCache
from train.shared_prefix import Fitted, Fleet

from .conftest import RULE, MakeJob


def data(job: Job) -> Rows:
    return load(job.data, job.rule, job.builder, 512)


def weights(fitted: PeftModel | Fitted | GuardError) -> dict[str, torch.Tensor]:
    model = fitted.model if isinstance(fitted, Fitted) else fitted
    assert isinstance(model, PeftModel)
    return {name: weight.clone() for name, weight in get_peft_model_state_dict(model).items()}


def fitted(*jobs: Job) -> list[dict[str, torch.Tensor]]:
    return [weights(model) for model in shared_prefix.fit([(job, data(job)) for job in jobs])]


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((weight - other[name]).abs().max()) for name, weight in one.items())


def with_lora(job: Job, **lora: object) -> Job:
    adapters = {name: each.model_copy(update={"lora": each.lora | lora}) for name, each in job.recipe.adapters.items()}
    return replace(job, recipe=job.recipe.model_copy(update={"adapters": adapters}))


def patient(job: Job, epochs: int) -> Job:
    adapters = {name: each.model_copy(update={"early_stopping_patience": epochs}) for name, each in job.recipe.adapters.items()}
    return replace(job, recipe=job.recipe.model_copy(update={"adapters": adapters}))


@pytest.mark.parametrize("settings", [{}, {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}, {"weight_decay": 0.1}])
def test_twenty_steps_give_the_adapter_that_trl_and_peft_train_on_whole_prompts(make_job: MakeJob, settings: dict[str, object]) -> None:
    one, reference = (make_job("alora", max_steps=20, learning_rate=3e-3, runs=runs, **settings) for runs in ("one", "reference"))
    (found,) = fitted(one)
    expected = weights(adapter.fit(reference, data(reference)))
    moved = max(float(weight.abs().max()) for name, weight in expected.items() if "lora_B" in name)
    assert moved > 0.02
    assert largest_difference(found, expected) < 0.02 * moved


def test_three_adapters_of_two_ranks_trained_together_are_those_trained_alone(make_job: MakeJob) -> None:
    def jobs(runs: str) -> list[Job]:
        return [
            make_job("alora", max_steps=12, runs=f"{runs}0"),
            with_lora(make_job("alora", seed=1, max_steps=9, learning_rate=3e-3, runs=f"{runs}1"), r=5),
            replace(make_job("alora", max_steps=12, runs=f"{runs}2"), rule=RULE.model_copy(update={"title": "Short."})),
        ]

    together = fitted(*jobs("together"))
    for found, job in zip(together, jobs("alone"), strict=True):
        (expected,) = fitted(job)
        assert largest_difference(found, expected) < 2e-3 * max(float(weight.abs().max()) for weight in expected.values())
    assert largest_difference(together[0], together[2]) > 1e-2


def test_gradients_are_those_of_peft_on_whole_prompts(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    found, expected = (
        # A random second factor: PEFT starts it at zero, and the first factor's gradient is then zero too.
        with_lora(make_job("alora", max_steps=1, per_device_train_batch_size=16, max_grad_norm=1e9, runs=runs), init_lora_weights=False)
        for runs in ("found", "expected")
    )
    gradients: list[list[torch.Tensor]] = []

    class Spy(torch.optim.AdamW):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            gradients.append([p.grad.clone() for group in self.param_groups for p in group["params"] if p.grad is not None])

    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", staticmethod(lambda *_: (Spy, {"lr": 1e-3})))
    fitted(found)
    adapter.fit(expected, data(expected))
    ours, plain = gradients
    assert len(ours) == len(plain) == 28
    for one, other in zip(ours, plain, strict=True):
        assert other.abs().max() > 1e-4
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_prefixes_go_through_the_base_once_for_all_epochs_seeds_and_rules(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    original = PrefixCache._computed

    def spy(cache: PrefixCache, prefixes: list[tuple[int, ...]]) -> dict[tuple[int, ...], torch.Tensor]:
        computed.append(len(prefixes))
        return original(cache, prefixes)

    monkeypatch.setattr(PrefixCache, "_computed", spy)
    jobs = [make_job("alora", seed=seed, num_train_epochs=2, runs=f"runs{seed}") for seed in (0, 1)]
    distinct = {row.prompt.token_ids[: row.prompt.invocation_start] for job in jobs for row in (*data(job).train, *data(job).validation)}
    fitted(*jobs)
    assert sum(computed[1:]) == len(distinct)  # the first measures what a token takes


def test_what_has_no_room_together_is_trained_one_after_another(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[list[int]] = []
    original = Fleet.train

    def spy(fleet: Fleet) -> None:
        trained.append([member.job.seed for member in fleet.members])
        original(fleet)

    monkeypatch.setattr(Fleet, "train", spy)
    jobs = [make_job("alora", seed=seed, max_steps=3, runs=f"runs{seed}") for seed in (0, 1, 2)]
    rows = [data(job) for job in jobs]
    first = [weights(model) for model in shared_prefix.fit(list(zip(jobs, rows, strict=True)))]
    monkeypatch.setattr(shared_prefix, "FREE_SHARE", 1e-9)  # nothing is kept
    again = [make_job("alora", seed=seed, max_steps=3, runs=f"again{seed}") for seed in (0, 1, 2)]
    second = [
        weights(model)
        for model in shared_prefix.fit(
            list(zip(again, (replace(rows[0], train=rows[0].train[:40]), replace(rows[0], train=rows[0].train[20:]), rows[0]), strict=True))
        )
    ]
    assert trained == [[0, 1, 2], [0], [1], [2]]
    assert first[2].keys() == second[2].keys()
    assert largest_difference(first[2], second[2]) < 1e-3


def test_a_loss_that_diverges_ends_its_adapter_alone(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [make_job("alora", seed=seed, max_steps=6, runs=f"runs{seed}") for seed in (0, 1)]
    update = Member.update

    def poisoned(member: Member, loss: float) -> None:
        if member.job.seed == 0 and member.step == 2:
            for weight in member.weights:
                weight.data.fill_(float("nan"))
        update(member, loss)

    monkeypatch.setattr(Member, "update", poisoned)
    lost, kept = (
        model if isinstance(model, GuardError) else weights(model) for model in shared_prefix.fit([(job, data(job)) for job in jobs])
    )
    assert isinstance(lost, GuardError)
    assert "toy alora seed 0: the loss is not a number any more" in str(lost)
    monkeypatch.undo()
    (alone,) = fitted(make_job("alora", seed=1, max_steps=6, runs="alone"))
    assert isinstance(kept, dict)
    assert largest_difference(kept, alone) < 1e-4


@pytest.mark.parametrize("setting", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_what_cannot_be_trained_this_way_is_refused(make_job: MakeJob, setting: dict[str, object]) -> None:
    with pytest.raises(GuardError, match=next(iter(setting))):
        fitted(with_lora(make_job("alora", max_steps=1), **setting))


@pytest.mark.parametrize("method", METHODS)
def test_early_stopping_ends_after_its_patience_with_the_best_epoch_s_weights(
    make_job: MakeJob, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(job: Job) -> dict[str, torch.Tensor]:
        return fitted(job)[0] if method == "alora" else weights(adapter.fit(job, data(job)))

    told = {8: 0.5, 16: 0.3, 24: 0.4, 32: 0.2999, 40: 0.35, 48: 0.36}  # 8 steps an epoch
    measured: list[float] = []

    def losses(logits: object, labels: object) -> float:
        measured.append(told[8 * (len(measured) + 1)])
        return measured[-1]

    for module in (shared_prefix, adapter):
        monkeypatch.setattr(module, "validation_loss", losses)
    found = trained(patient(make_job(method, num_train_epochs=20, lr_scheduler_type="constant", runs="stopped"), 2))
    assert measured == list(told.values())
    assert largest_difference(found, trained(make_job(method, num_train_epochs=4, lr_scheduler_type="constant", runs="four"))) < 1e-4


def test_validation_logits_are_those_of_plain_peft_for_adapters_of_one_rule_and_of_another(make_job: MakeJob) -> None:
    jobs = [make_job("alora", seed=seed, max_steps=6, runs="runs") for seed in (0, 1)]
    other = replace(jobs[0], rule=RULE.model_copy(update={"title": "Short."}), seed=2)
    for job, fitted_job in zip([*jobs, other], shared_prefix.fit([(job, data(job)) for job in (*jobs, other)]), strict=True):
        assert isinstance(fitted_job, Fitted)
        expected = verdict_logits(fitted_job.model, [row.prompt for row in data(job).validation], job.builder)
        assert fitted_job.validation_logits == pytest.approx(expected, abs=1e-4)
        assert max(expected) - min(expected) > 0.1


@pytest.mark.parametrize("method", METHODS)
def test_early_stopping_measures_the_validation_split(make_job: MakeJob, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    job = patient(make_job(method, num_train_epochs=1), 1)
    seen: list[tuple[list[float], list[int]]] = []
    for module in (shared_prefix, adapter):
        monkeypatch.setattr(module, "validation_loss", lambda logits, labels: (seen.append((list(logits), list(labels))), 0.0)[1])
    validation = data(job).validation
    if method == "alora":
        (found,) = (each.validation_logits for each in shared_prefix.fit([(job, data(job))]) if isinstance(each, Fitted))
    else:
        found = verdict_logits(adapter.fit(job, data(job)), [row.prompt for row in validation], job.builder)
    ((logits, labels),) = seen
    assert labels == [row.label for row in validation]
    assert logits == pytest.approx(found, abs=1e-5)

import hashlib
import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from distft.demo import data
from distft.demo.answers import ask_about
from distft.demo.errors import DemoError
from distft.demo.plan import Job, Sizes, choose
from distft.demo.progress import FileReport, following
from distft.demo.report import print_report
from distft.demo.results import Result
from distft.demo.run import MARKER, _open_folder
from distft.demo.tokenizer import IGNORED, MAX_TOKENS, load_tokenizer, prompt_ids, row
from distft.demo.tokenizer import train_tokenizer as train
from distft.demo.training import Run
from distft.measure import ModelStateBytes
from distft.strategies.by_name import strategy


@pytest.fixture(scope="module")
def examples():
    return data.examples()


@pytest.fixture(scope="module")
def tokenizer(examples):
    return train(examples)


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_there_are_two_thousand_examples_and_no_answer_occurs_twice(examples):
    assert len(examples) == 2000
    assert len({example.answer for example in examples}) == 2000


def test_every_question_names_its_function_and_every_answer_is_one_short_sentence(examples):
    assert all(example.name in example.question for example in examples)
    assert all(20 <= len(example.answer) <= 140 for example in examples)
    assert not any("\n" in example.answer for example in examples)


def test_another_process_makes_the_same_examples_whatever_was_imported_before(examples):
    import transformers  # noqa: F401  it patches the standard library, which must not show

    code = "from distft.demo.data import examples; import hashlib; print(hashlib.sha256("
    code += "repr(examples()).encode()).hexdigest())"
    assert python(code).strip() == hashlib.sha256(repr(examples).encode()).hexdigest()


def test_collecting_the_examples_prints_nothing_starts_no_thread_and_imports_no_torch():
    code = "from distft.demo.data import examples; examples(); import sys, threading;"
    code += "print(threading.active_count(), 'torch' in sys.modules, 'this' in sys.modules)"
    assert python(code) == "1 False False\n"


def test_more_examples_than_there_are_docstrings_is_an_error_with_both_numbers():
    with pytest.raises(DemoError, match=r"9000 documented names .* shows 2\d{3}\b.*-OO"):
        data.examples(9000)


def test_importing_distft_does_not_import_the_demo():
    assert python("import distft, sys; print('distft.demo' in sys.modules)") == "False\n"


def test_the_tokenizer_is_the_same_at_every_training(examples, tokenizer):
    assert train(examples).get_vocab() == tokenizer.get_vocab()


def test_the_tokenizer_reloads_through_auto_tokenizer_beside_a_qwen3_config(
    examples, tokenizer, tmp_path
):
    from distft.demo.model import model_config

    tokenizer.save_pretrained(tmp_path)
    model_config(tokenizer).save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.chat_template == tokenizer.chat_template
    assert [again.encode(e.answer) for e in examples[::50]] == [
        tokenizer.encode(e.answer) for e in examples[::50]
    ]


def test_any_text_survives_encoding_and_decoding(tokenizer):
    text = "naïve 漢字 \t\x00 <|im_start|> 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_writes_roles_and_ends_each_message(tokenizer):
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    )


def test_a_row_is_the_whole_chat_and_begins_with_the_prompt(examples, tokenizer):
    for example in examples[::100]:
        ids = row(tokenizer, example)["input_ids"]
        text = tokenizer.apply_chat_template(example.messages, tokenize=False)
        prompt = prompt_ids(tokenizer, example.question)
        assert ids[: len(prompt)] == prompt
        assert text.removesuffix("\n").startswith(tokenizer.decode(ids))


def test_the_loss_is_on_the_answer_and_its_end_token_only(examples, tokenizer):
    example = min(examples, key=lambda e: len(e.answer))
    encoded = row(tokenizer, example)
    prompt = prompt_ids(tokenizer, example.question)
    learned = [label for label in encoded["labels"] if label != IGNORED]
    assert encoded["labels"][: len(prompt)] == [IGNORED] * len(prompt)
    assert tokenizer.decode(learned) == example.answer + "<|im_end|>"


def test_no_row_is_longer_than_the_limit(examples, tokenizer):
    assert max(len(row(tokenizer, e)["input_ids"]) for e in examples) <= MAX_TOKENS


def test_the_model_has_between_two_and_ten_million_parameters(tokenizer):
    from distft.demo.model import model_config
    from distft.spec import ModelSpec

    assert 2e6 < ModelSpec.from_config(model_config(tokenizer)).total_params < 10e6


@pytest.mark.parametrize("ranks", range(1, 10))
def test_the_rows_of_a_step_divide_over_the_ranks_and_over_twice_as_many(ranks):
    sizes = Sizes.for_ranks(ranks)
    assert sizes.micro_batches % (2 * ranks) == 0
    assert sizes.micro_batch >= 1


def test_without_a_launcher_hsdp_gets_twice_the_ranks():
    chosen, _ = choose(["hsdp"], 2, under_launcher=False)
    assert chosen[0].ranks == 4
    assert repr(chosen[0].strategy) == "HSDP(dp_replicate=2, dp_shard=2)"


def test_a_launcher_with_two_ranks_leaves_hsdp_out_and_says_why():
    chosen, left_out = choose([], 2, under_launcher=True)
    assert "hsdp" not in [choice.strategy.name for choice in chosen]
    assert "at least 4, not 2" in left_out[-1]


def test_asking_for_a_strategy_that_does_not_fit_is_an_error():
    with pytest.raises(DemoError, match="at least 4, not 3"):
        choose(["hsdp"], 3, under_launcher=True)


def test_without_deepspeed_the_zero_strategies_are_left_out_and_the_extra_is_named(monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name)
    )
    chosen, left_out = choose([], 2, under_launcher=False)
    assert [choice.strategy.name for choice in chosen] == ["ddp", "fsdp2", "hsdp"]
    assert len(left_out) == 3
    assert all("distft[deepspeed]" in sentence for sentence in left_out)


def test_a_folder_that_is_not_the_demos_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(DemoError, match="--out"):
        _open_folder(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_the_folder_of_an_earlier_demo_is_emptied(tmp_path):
    (tmp_path / MARKER).touch()
    (tmp_path / "losses.png").touch()
    _open_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [MARKER]


def test_every_line_that_a_rank_reports_reaches_the_bar(tmp_path):
    seen = []
    report = FileReport(tmp_path / "steps")
    with following(report.path, lambda step, loss: seen.append((step, loss))):
        for step in range(1, 51):
            report(step, 1 / step)
    assert seen == [(step, 1 / step) for step in range(1, 51)]


def test_the_questions_asked_are_of_the_data_set(examples):
    asked = ask_about(examples)
    assert len(asked) == 3
    assert set(asked) <= set(examples)


def made_up_result(name="ddp", losses=(4.0, 3.0, 2.0, 1.0), resumed=(3.0, 2.0, 1.0), **changes):
    alone = Run((4.0, 3.0, 2.0, 1.0), (1.0,) * 4, 1.0)
    run = Run(losses, (1.0,) * 4, 1.0, ModelStateBytes(400, 400, 800), 800.0, resumed)
    job = Job(strategy(name), 2, {}, [], Sizes.for_ranks(2), 4, 0, Path("."), Path("."))
    return replace(Result.of(job, [run, run], alone, (1600, 800.0), {}), **changes), alone


def test_equal_losses_have_no_fault():
    result, _ = made_up_result()
    assert result.faults() == []
    assert result.difference == 0


@pytest.mark.parametrize("wrong", [3.0 * (1 + 2e-5), float("nan")])
def test_a_loss_beyond_the_tolerance_is_a_fault_that_names_the_step(wrong):
    result, _ = made_up_result(losses=(4.0, wrong, 2.0, 1.0))
    assert "loss of step 2 differs" in result.faults()[0]


def test_a_resume_that_is_one_bit_off_is_a_fault():
    result, _ = made_up_result(resumed=(3.0, 2.0, 1.0 + 2**-52))
    assert "resuming from step 1" in result.faults()[0]


def test_a_formula_that_is_off_is_named_with_both_numbers():
    result, _ = made_up_result(state_formula=1599)
    assert "1,600 bytes" in result.misses()[0]
    assert "1,599" in result.misses()[0]


def test_the_table_fits_eighty_columns_and_shows_every_number():
    results, alone = [], None
    for name in ("ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp"):
        result, alone = made_up_result(
            name, state=ModelStateBytes(9_000_000, 9_000_000, 18_000_000), state_formula=36_000_000
        )
        results.append(result)
    console = Console(width=80, file=io.StringIO())
    print_report(console, alone, results)
    text = console.file.getvalue()
    assert "…" not in text
    assert text.count("36.000 =36.000") == 6


def test_both_pictures_are_written(tmp_path):
    from distft.demo.plots import plot_losses, plot_memory

    results, alone = [], None
    for name in ("ddp", "zero3", "hsdp"):
        result, alone = made_up_result(name)
        results.append(result)
    plot_losses(tmp_path / "losses.png", alone, results)
    plot_memory(tmp_path / "memory.png", results)
    for name in ("losses.png", "memory.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")

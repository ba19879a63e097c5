"""Log-probs: which logits belong to which token, masks, precision, memory."""

import json
import shutil

import pytest
import torch
from support import random_batch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from bapo.ops.logprobs import token_logprobs
from bapo.ops.microbatch import cut_by_tokens
from bapo.policy.causal_lm import CausalLMPolicy, load_model, load_tokenizer
from bapo.rollouts.pool import collate
from bapo.types import Batch, Sample


def tiny_qwen2(tied: bool = False, seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=15, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=15, n_embd=32, n_layer=2, n_head=2, n_positions=64))


def rollout(prompt: tuple[int, ...], response: tuple[int, ...]) -> Sample:
    return Sample("p", 0, 0, prompt).extended(response, (-1.0,) * len(response), "stop", 0)


def batch_of(*pairs: tuple[tuple[int, ...], tuple[int, ...]]) -> Batch:
    return collate([rollout(*pair) for pair in pairs], pad_id=0)


class Markov(nn.Module):
    """A language model whose logits after token i are row i of `table`."""

    def __init__(self, table: torch.Tensor):
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(torch.eye(len(table)))
        self.head = nn.Linear(len(table), len(table), bias=False)
        self.head.weight = nn.Parameter(table.T.clone())

    @property
    def base_model(self):
        def forward(input_ids, attention_mask, use_cache):
            return type("Output", (), {"last_hidden_state": self.embed(input_ids)})

        return forward

    def get_output_embeddings(self):
        return self.head


def test_token_t_is_scored_by_the_logits_of_token_t_minus_1():
    table = torch.tensor([[0.1, 1.0, -1.0], [2.0, 0.0, 0.5], [0.3, 0.3, 3.0]])
    scores = CausalLMPolicy(Markov(table))(batch_of(((0,), (1, 2))))
    expected = [0.0, float(table[0].log_softmax(0)[1]), float(table[1].log_softmax(0)[2])]
    assert scores.logprobs[0].tolist() == pytest.approx(expected, abs=1e-6)
    p = table[0].softmax(0)
    assert float(scores.entropy[0, 1]) == pytest.approx(float(-(p * p.log()).sum()), abs=1e-6)
    assert float(scores.entropy[0, 0]) == 0.0


def test_temperature_divides_logits_not_logprobs():
    head = nn.Linear(3, 3, bias=False)
    head.weight = nn.Parameter(torch.eye(3))
    hidden = torch.tensor([[2.0, 1.0, 0.0]]).expand(3, 3)
    logprobs, _ = token_logprobs(hidden, torch.tensor([0, 1, 2]), head, temperature=0.6)
    assert logprobs.tolist() == pytest.approx([-0.202573, -1.869240, -3.535906], abs=1e-6)


@pytest.mark.parametrize("model", [tiny_qwen2(), tiny_gpt2()], ids=["rotary", "learned positions"])
def test_a_row_is_scored_the_same_alone_and_among_others(model):
    policy = CausalLMPolicy(model)
    alone = policy(batch_of(((3, 4, 5), (6, 7, 8))))
    beside = policy(batch_of(((3, 4, 5), (6, 7, 8)), ((9, 10), (11, 12, 13, 14, 2, 3, 4))))
    other = policy(batch_of(((3, 4, 5), (6, 7, 8)), ((2, 2), (3, 3, 3, 3, 3, 3, 3))))
    torch.testing.assert_close(beside.logprobs[0, :6], alone.logprobs[0], atol=1e-5, rtol=0)
    assert torch.equal(beside.logprobs[0], other.logprobs[0])


def test_changing_a_token_changes_its_own_logprob_and_later_ones_only():
    policy = CausalLMPolicy(tiny_qwen2())
    base = policy(batch_of(((3, 4), (5, 6, 7)))).logprobs[0]
    last = policy(batch_of(((3, 4), (5, 6, 8)))).logprobs[0]
    first = policy(batch_of(((3, 4), (9, 6, 7)))).logprobs[0]
    assert torch.equal(base[:4], last[:4])
    assert base[4] != last[4]
    assert all(base[t] != first[t] for t in (2, 3, 4))


def test_masks_come_from_lengths_not_token_values():
    end = 2  # end of sequence and padding at once
    batch = collate([rollout((1,), (7, 9, end)), rollout((1,), (7, 9, 8, 5, 4))], pad_id=end)
    assert batch.response_mask[:, 1:].int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch.input_ids[0].tolist() == [1, 7, 9, end, end, end]


def test_scores_agree_with_the_models_own_logits_and_are_float32_for_a_bfloat16_model():
    model = tiny_qwen2()
    batch = random_batch(5)
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits / 0.7
    expected = logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
    scores = CausalLMPolicy(model, temperature=0.7)(batch)
    mask = batch.response_mask
    torch.testing.assert_close(scores.logprobs[mask], expected[mask[:, 1:]], atol=1e-5, rtol=0)
    assert CausalLMPolicy(model.bfloat16())(batch).logprobs.dtype == torch.float32


def test_scoring_in_pieces_equals_scoring_at_once():
    policy = CausalLMPolicy(tiny_qwen2())
    batch = random_batch(7)
    whole = policy(batch)
    for budget in (1, 24, 10_000):
        pieces = policy.token_stats(batch, token_budget=budget)
        torch.testing.assert_close(pieces.logprobs, whole.logprobs, atol=1e-6, rtol=0)
        torch.testing.assert_close(pieces.entropy, whole.entropy, atol=1e-6, rtol=0)


def test_dropout_in_the_config_is_switched_off(caplog):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=15, n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5
        )
    )
    policy = CausalLMPolicy(model).train()
    batch = random_batch(4)
    assert torch.equal(policy(batch).logprobs, policy(batch).logprobs)
    assert "dropout is set to 0" in caplog.text


def test_attention_dropout_that_is_a_number_in_the_config_is_switched_off():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=15, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, attention_dropout=0.5,
    )  # fmt: skip
    policy = CausalLMPolicy(Qwen2ForCausalLM(config)).train()
    batch = random_batch(4)
    assert torch.equal(policy(batch).logprobs, policy(batch).logprobs)


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return out


def test_logits_exist_for_one_chunk_at_a_time_in_forward_and_backward():
    torch.manual_seed(0)
    head = nn.Linear(4, 100, bias=False)
    hidden = torch.randn(64, 4, requires_grad=True)
    targets = torch.randint(100, (64,))
    with LargestTensor() as seen:
        chunked, entropy = token_logprobs(hidden, targets, head, chunk_tokens=8)
        chunked.sum().backward()
    assert seen.largest == 800
    gradient, head_gradient = hidden.grad.clone(), head.weight.grad.clone()
    hidden.grad = head.weight.grad = None
    plain, plain_entropy = token_logprobs(hidden, targets, head, chunk_tokens=64)
    plain.sum().backward()
    torch.testing.assert_close(chunked, plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, plain_entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient, hidden.grad, atol=1e-5, rtol=0)
    torch.testing.assert_close(head_gradient, head.weight.grad, atol=1e-5, rtol=0)
    assert not entropy.requires_grad


@pytest.mark.parametrize("tied", [True, False])
def test_weights_handed_out_rebuild_the_model(tied):
    model, fresh = tiny_qwen2(tied), tiny_qwen2(tied, seed=1)
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(0.1)  # an update of the head
    weights = dict(CausalLMPolicy(model).named_weights())
    assert ("lm_head.weight" in weights) != tied
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            parameter.copy_(weights.pop(name))
    assert not weights
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(model(ids).logits, fresh(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "left", "load"),
    [
        ("model.safetensors", 0.5, load_model),
        ("model.safetensors", None, load_model),
        ("config.json", 0.5, load_model),
        ("tokenizer.json", 0.5, load_tokenizer),
        ("tokenizer.json", None, load_tokenizer),
        ("tokenizer_config.json", 0.5, load_tokenizer),
        ("tokenizer*.json", None, load_tokenizer),
    ],
)
def test_a_broken_folder_is_named(tmp_path, model_folder, name, left, load):
    """left: share of the file's bytes that is left, None for no file."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    for path in folder.glob(name):
        content = path.read_bytes()
        path.unlink()
        if left is not None:
            path.write_bytes(content[: int(left * len(content))])
    with pytest.raises(
        ValueError, match=r"policy.path is '.*model'; (no (model|tokenizer) could be loaded|its tokenizer has no)"
    ):
        load(folder)


def test_a_folder_with_code_of_its_own_does_not_run_it(tmp_path, model_folder):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    sentinel = tmp_path / "sentinel"
    (folder / "evil.py").write_text(f"open({str(sentinel)!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_model(folder)
    assert not sentinel.exists()


def test_a_model_that_caps_its_logits_is_refused(tmp_path):
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=15, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, final_logit_softcapping=0.5, pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="its logits are not its output embeddings alone"):
        load_model(tmp_path)


def test_a_tokenizer_without_pad_pads_with_its_end(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.pad_token_id == tokenizer.pad_token_id != loaded.eos_token_id


def test_micro_batches_hold_every_row_once_within_the_budget():
    lengths = torch.tensor([5, 1, 9, 3, 3, 9, 2])
    cuts = cut_by_tokens(lengths, 12)
    assert sorted(torch.cat(cuts).tolist()) == list(range(7))
    assert [lengths[rows].tolist() for rows in cuts] == [[9], [9], [5, 3], [3, 2, 1]]
    assert [len(rows) for rows in cut_by_tokens(lengths, 1)] == [1] * 7
    with pytest.raises(ValueError, match="token_budget is 0"):
        cut_by_tokens(lengths, 0)

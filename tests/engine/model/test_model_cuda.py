"""On a GPU: same logits, every weight on the card, and no step in which the host waits for it."""

import pytest
import torch

from minillm.model import ModelConfig, Transformer, cross_entropy, load_hf, save_hf

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
CONFIG = ModelConfig(61, 64, 96, 2, 4, 2, qk_norm=True)
TOKENS = torch.arange(24).reshape(2, 12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_logits_equal_the_cpu(dtype, tolerance):
    expected = Transformer(CONFIG, dtype=torch.float64)(TOKENS)
    model = Transformer(CONFIG, device="cuda", dtype=dtype)
    assert all(t.is_cuda for t in (*model.parameters(), *model.buffers()))
    torch.testing.assert_close(model(TOKENS.cuda()).cpu().double(), expected, rtol=0, atol=tolerance)


def test_a_training_step_never_waits_for_the_card():
    """The check of token ids would; that is why it looks at tokens on the CPU only."""
    model, tokens, positions = Transformer(CONFIG, device="cuda"), TOKENS.cuda(), torch.arange(12, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for given in (None, positions):
            cross_entropy(model(tokens, given), tokens).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_saved_from_and_loaded_to_the_card(tmp_path):
    model = Transformer(CONFIG, device="cuda", dtype=torch.bfloat16)
    save_hf(model, tmp_path)
    loaded = load_hf(tmp_path, device="cuda")
    assert all(torch.equal(p, loaded.get_parameter(name)) for name, p in model.named_parameters())

"""Names of secrets: one list decides what is passed on, recorded, shown to others and sent."""

from __future__ import annotations

import pytest

from vitscale.base.secret_names import is_plain_value, is_secret_name

SECRET = (
    "HF_TOKEN", "WANDB_API_KEY", "HF_PAT", "DS_CRED", "DS_CREDS", "VITSCALE_PASSPHRASE", "NCCL_MY_SECRETX", "TORCH_PWD",
    "DB_PASSWORD", "PGPASSWORD", "MY_PASS", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AZURE_CLIENT_SECRET",
    "GITHUB_PAT", "HF_AUTH", "AZURE_SAS", "SSHKEY", "SENTRY_DSN", "--hf_token", "--wandb-key", "--auth", "--pat", "pwd",
    "apiKey", "accountkey", "Authorization-Bearer", "db.password", "MY_KEY_2", "keys",
)  # fmt: skip
OPEN = (
    "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PWD", "OLDPWD", "NCCL_DEBUG", "NCCL_COMPAT", "CUDA_CACHE_PATH",
    "KEYBOARD", "GIT_AUTHOR", "TOKENIZERS_PARALLELISM", "--tokenizer", "TORCH_COMPILE_BYPASS", "OMP_SIGNAL", "--passes",
    "--patch-size", "DS_COMPASS", "NCCL_SASH", "HF_HOME", "credit", "--design", "TORCH_CREDITS",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRET)
def test_a_name_of_a_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", OPEN)
def test_a_name_that_only_looks_like_one(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize("value", ["1", "123456", "0.5", "true", "INFO", "offline"])
def test_a_word_or_a_number_is_plain(value: str) -> None:
    assert is_plain_value(value)


@pytest.mark.parametrize("value", ["1234567", "abc12", "a b", "/home/x", "ib0,ib1", "", "x" * 21])
def test_what_may_be_a_name_a_path_or_a_key_is_not(value: str) -> None:
    assert not is_plain_value(value)

"""Names whose values are secrets, and values that are too plain to identify anybody: the one place that decides either.

A name is that of a variable, an option or a key of a table: WANDB_API_KEY, --hf_token, db_password. Values of secret
names are not passed on to ranks, not recorded, not readable by other users, and taken out of a redacted bundle.
"""

from __future__ import annotations

import re

SECRET_WORD = "|".join(
    (
        "token(?!i[sz])",
        "secret",
        "passw",
        "passphrase",
        "passcode",
        "credential",
        "bearer",
        "(?:account|api|access|private|signing|shared)[_-]?key",
        "sharedaccesssignature",
    )
)
"""Pattern of words that mark a secret wherever they stand in a name, as in NCCL_MY_SECRETX, but not in "tokenizer"."""
LONE_WORD = r"keys?|pat|pwd|pass|creds?|auth|sas|sig|signature|dsn|jwt|cookie"
"""Pattern of words that mark a secret where they stand alone in a name, as in HF_PAT: not in PATH, MONKEY or AUTHOR."""
_SECRET_NAME = re.compile(
    "(?i)"
    f"{SECRET_WORD}"
    f"|(?<![a-z0-9])(?:{LONE_WORD})(?![a-z])"
    "|(?<=[a-z])keys?(?![a-z])"  # apikey, sshkeys
    "|cred$"  # usercred
)
_FOLDER_NAMES = ("PWD", "OLDPWD")
"""Variables of every shell: the folder that it is in, and the one before."""
_PLAIN_VALUE = re.compile(r"[A-Za-z_]{1,20}|\d{1,6}|\d\.\d+")
"""One word, or one number."""


def is_secret_name(name: str) -> bool:
    """Whether the value of a variable, an option or a field of this name is to be kept from others."""
    return name not in _FOLDER_NAMES and _SECRET_NAME.search(name) is not None


def is_plain_value(value: str) -> bool:
    """Whether a value is one word or one number, which is a setting; another may be a name, a path or a key."""
    return _PLAIN_VALUE.fullmatch(value) is not None

"""The results folder: crash-safe writes, strict reads, one driver at a time.

    RESULTS/
      study.json                        what the study is; replaced whole
      lock                              held by the driver (a kernel lock: free again when it dies, however it dies)
      runs/TRIAL-rREPEAT-aATTEMPT/
        trial.json                      what this run was to do
        log.txt                         what the launcher and the ranks printed
        rank-K.jsonl                    one line per event of rank K, appended by that rank alone
        outcome.json                    written last: a run without one was interrupted, and does not count
      packs/NUMBER-DIGEST.parquet       a hundred finished runs as columns, in place of their files (`packs`)

A crash at any instant leaves each file whole or plainly incomplete: whole files appear by rename, lines are cut off
at most at the end. Every attempt has a folder of its own, so nothing of two attempts can mix.
"""

from vitscale.base.files import is_stream
from vitscale.store.reading import (
    RunIndex,
    folder_of,
    load,
    pack_finished,
    read_rank,
    read_ranks,
    read_study,
    without_lines,
)
from vitscale.store.writing import (
    DISK_FULL_ERRORS,
    RankLog,
    free_reserves,
    is_full,
    locked,
    new_run_folder,
    refuse_links,
    write_outcome,
    write_record,
    write_study,
    write_whole,
)

__all__ = [
    "DISK_FULL_ERRORS",
    "RankLog",
    "RunIndex",
    "folder_of",
    "free_reserves",
    "is_full",
    "is_stream",
    "load",
    "locked",
    "new_run_folder",
    "pack_finished",
    "read_rank",
    "read_ranks",
    "read_study",
    "refuse_links",
    "without_lines",
    "write_outcome",
    "write_record",
    "write_study",
    "write_whole",
]

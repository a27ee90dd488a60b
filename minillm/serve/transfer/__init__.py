"""Keys and values computed by one engine and used by another: prefill and decode in pools of their own.

    prefill ranks (their own processes)                    decode ranks
    asked ──▶ scheduler ──▶ layer 0, 1, 2, ...             admit: blocks of the whole prompt ──▶ ask, wait
                             │ rows of each layer,               │
                             ╰──── as it is computed ────────▶ written into these blocks ──▶ as after a hit in the cache

Prompts stall nobody's tokens any more, and each pool can have its own number of ranks (DistServe, Zhong et al. 2024;
Splitwise, Patel et al. 2023). A hand-over is a hit in a prefix cache that is elsewhere. Whatever becomes of it, the
decode side keeps the request and computes what it was not given.

Reading order:
1. `decode.py`    the decode side: `begin`, what arrives, what ends a hand-over early
2. `receive.py`   a decode rank: frames into blocks, unless their ticket is closed
3. `prefill.py`   the prefill side: an ordinary engine whose steps say what is sent
4. `send.py`      a prefill rank: rows of a layer leave while the next layers compute
5. `layout.py`    what both sides must have in common; which rank sends which heads to which
Beside the path: `rows.py` (what lies in a slot, as bytes), `wire.py` (messages and frames), `members.py` (decode ranks
besides rank 0), `pool.py` (processes: started, started anew, ended), `migrate.py` (a running request goes on in another
engine, which is handed its keys).
"""

from minillm.serve.transfer.decode import DecodeSide, HandOver
from minillm.serve.transfer.layout import Layout
from minillm.serve.transfer.migrate import Moved, keys_offered, put_in, take_out
from minillm.serve.transfer.pool import PrefillAt, PrefillPool
from minillm.serve.transfer.prefill import serve_prefill
from minillm.serve.transfer.receive import Receiver
from minillm.serve.transfer.send import Receipt, Sender

__all__ = [
    "DecodeSide",
    "HandOver",
    "Layout",
    "Moved",
    "PrefillAt",
    "PrefillPool",
    "Receipt",
    "Receiver",
    "Sender",
    "keys_offered",
    "put_in",
    "serve_prefill",
    "take_out",
]

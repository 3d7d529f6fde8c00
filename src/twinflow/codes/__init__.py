"""Numbers in few bits: the codes that compressed collectives send, and what they mean."""

from twinflow.codes.code import BLOCK, CODES, Code, code_named

__all__ = ["BLOCK", "CODES", "Code", "code_named"]

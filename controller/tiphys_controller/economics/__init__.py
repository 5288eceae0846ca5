"""What failures have cost a run: where its time went, and what each recovery took."""

from tiphys_controller.economics.account import Account, accounts, by_queue
from tiphys_controller.economics.ledger import Entry, Recovery, StepLedger
from tiphys_controller.economics.spans import Phase, Span

__all__ = ["Account", "Entry", "Phase", "Recovery", "Span", "StepLedger", "accounts", "by_queue"]

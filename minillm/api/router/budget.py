"""How many retries there may be: a share of the requests, so that replicas that fail do not get twice the load.

With k attempts each, a fleet that cannot serve its load is sent up to k times that load: a retry storm, which keeps it
down. A budget that each request fills a little, and each retry empties by one, bounds the sum of both to 1 + share
times the requests (as in Finagle, Envoy and the Google SRE book, "Handling Overload"). It is for replicas that refuse
or break off and go on; what moves away from one that is gone is not more load, and not counted.
"""


class RetryBudget:
    """share: retries per request, in the long run. reserve: retries that are free at the start, and the most that are
    saved up."""

    def __init__(self, share: float = 0.2, reserve: float = 10.0):
        if share < 0 or reserve < 0:
            raise ValueError(f"a retry budget of {share} per request and {reserve} in reserve: use 0 or more")
        self.share, self.reserve, self.balance = share, reserve, reserve

    def deposit(self) -> None:
        """A request has come; its own retries are not requests."""
        self.balance = min(self.reserve, self.balance + self.share)

    def withdraw(self) -> bool:
        """Whether one retry may go out, which then is paid."""
        if self.balance < 1:
            return False
        self.balance -= 1
        return True

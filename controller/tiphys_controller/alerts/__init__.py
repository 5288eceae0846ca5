"""What Alertmanager says about runs: taken in durably (`payload`, `inbox`), acted upon once (`rules`, `orders`)."""

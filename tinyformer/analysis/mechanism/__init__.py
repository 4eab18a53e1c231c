"""Why a head does what it does: what it reads and writes, which heads it works with, and which of them are enough."""

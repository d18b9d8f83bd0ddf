"""Cases over several processes: `launcher` starts them, `rank` is one, `ranks` asks them, `nodes` finds those of other machines."""

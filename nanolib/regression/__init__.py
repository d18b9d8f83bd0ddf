"""Did it get slower? Runs compared case by case, in words that say how sure they are."""

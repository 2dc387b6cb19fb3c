"""What keeps samples apart though the rules of ops alone do not see it. Each entry has its argument where it stands.

entries         tokens sorted by expert, or elements that a mask chooses, are worked on one by one, and put back
hits            loops over what any element of a mask chooses, experts say
same_places     places that hold the same for every sample, as those of class tokens
bags            bags of words that are rows of as many words each
batch_merges    sums and means over samples, which are put together of those of parts
guarded         questions about each element, which are only asked to raise an error
switches        both branches of a question whether any row is masked give a row without padding the same
"""

from autoshard.axes.bags import bags
from autoshard.axes.batch_axes import BatchAxes, State
from autoshard.axes.entries import Entries
from autoshard.axes.hits import Hits
from autoshard.axes.same_places import SamePlaces
from autoshard.capture.graph import Op


class Sound:
    """The entries that say what an op makes, for one walk."""

    def __init__(self, walk: BatchAxes) -> None:
        self.walk = walk
        self.entries = Entries(walk)
        self.hits = Hits(walk)
        self.places = SamePlaces(walk)

    def results(self, op: Op) -> list[State] | None:
        """The states of the results of an op by an entry, with their axes; None if none of them is about it."""
        made = self.places.results(op)
        if made is None:
            made = self.hits.results(op)
        if made is not None:
            return made
        return self.entries.results(op) or bags(self.walk, op)

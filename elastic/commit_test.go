package elastic

import (
	"slices"
	"testing"

	"github.com/gohvd/gohvd/hvd"
)

// text is a State.
type text []byte

func (s *text) Save() ([]byte, error) { return slices.Clone(*s), nil }

func (s *text) Restore(data []byte) error {
	*s = slices.Clone(data)
	return nil
}

// A commit that was saved and not granted does not take the place of a later one with the same number.
func TestCommitThatWasNotGranted(t *testing.T) {
	if err := hvd.Init(t.Context(), hvd.WithSetting("HVD_SIZE", "1")); err != nil {
		t.Fatal(err)
	}
	defer hvd.Shutdown(t.Context())
	s := text("committed")
	j := &Job{state: &s, granted: commit{1, []byte("committed")}, saved: commit{2, []byte("lost")}}
	// The ranks go back to the first commit, and go on until the launcher changes the ranks.
	if err := j.sync(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	s = text("later")
	if err := j.keep(); err != nil {
		t.Fatal(err)
	}
	if err := j.sync(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	if got := string(j.granted.data); got != "later" || j.granted.number != 2 {
		t.Errorf("got commit %d with %q, want 2 with the later state", j.granted.number, got)
	}
}

// A rank that has saved a commit uses it if another rank has seen it granted.
func TestCommitThatOthersSawGranted(t *testing.T) {
	j := &Job{granted: commit{1, []byte("a")}, saved: commit{2, []byte("b")}}
	if j.settle(2); string(j.granted.data) != "b" || j.saved.number != 0 {
		t.Errorf("got %+v, want the second commit", j)
	}
}

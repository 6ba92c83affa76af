package serve

import (
	"container/list"
	"errors"
	"io"
	"sync"
)

// ErrCrowded is why a connection was thrown out of a Doorway.
var ErrCrowded = errors.New("closed without a proof to make room: too many such connections")

// Doorway is where connections stand that have yet to prove that they may come in. At most so many are there at a time; one
// more, and the oldest has to go: who can prove it is through in a moment, so it is a stranger as a rule, and one of ours
// tries again.
type Doorway struct {
	most int

	mu  sync.Mutex
	way list.List // of *Place, oldest first
}

// NewDoorway has room for most connections, at least one.
func NewDoorway(most int) *Doorway { return &Doorway{most: most} }

// Grow makes room for most connections, if that is more than there was.
func (d *Doorway) Grow(most int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.most = max(d.most, most)
}

// Place is a connection's in a Doorway.
type Place struct {
	of   *Doorway
	conn io.Closer
	at   *list.Element // nil once it has been left
}

// Enter gives conn a place, and closes the connection that has had one for the longest time if there are too many. Whoever
// calls it must leave the place.
func (d *Doorway) Enter(conn io.Closer) *Place {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.way.Len() >= d.most {
		oldest := d.way.Remove(d.way.Front()).(*Place)
		oldest.at = nil
		oldest.conn.Close()
	}
	p := &Place{of: d, conn: conn}
	p.at = d.way.PushBack(p)
	return p
}

// Leave gives up the place, and reports whether the connection still had it. It is called once.
func (p *Place) Leave() bool {
	p.of.mu.Lock()
	defer p.of.mu.Unlock()
	if p.at == nil {
		return false
	}
	p.of.way.Remove(p.at)
	p.at = nil
	return true
}

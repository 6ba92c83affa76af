package bootstrap

import (
	"container/list"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/frame"
	"github.com/gohvd/gohvd/secret"
)

var errCrowded = errors.New("closed without a proof of the key to make room: too many such connections")

// door lets in who proves the key. At most so many connections are in the doorway at a time; one more, and the oldest has
// to go: who knows the key is through in a moment, so it is a stranger as a rule, and a rank tries again.
type door struct {
	key     secret.Secret
	magic   string
	most    int
	timeout time.Duration // to prove the key and to say what is wanted

	mu  sync.Mutex
	way list.List // of net.Conn, oldest first
}

// meet lets conn in and reads its first frame. Then conn has no deadline.
func (d *door) meet(conn net.Conn) ([]byte, error) {
	conn.SetDeadline(time.Now().Add(d.timeout))
	place := d.enter(conn)
	version, err := d.prove(conn)
	if !d.leave(place) {
		return nil, errCrowded
	}
	if err != nil {
		return nil, fmt.Errorf("not let in: %w", err) // io.EOF if it only looked whether somebody listens
	}
	// Not earlier, so that the other end still tries again if it was thrown out.
	if _, err := conn.Write(dial.Greeting(d.magic, protocolVersion)); err != nil {
		return nil, err
	}
	if version != protocolVersion {
		return nil, &dial.VersionError{Got: version, Want: protocolVersion}
	}
	body, err := frame.Read(conn, maxControlBytes)
	if err != nil {
		return nil, fmt.Errorf("reading the first frame: %v", err) // not wrapped: io.EOF would not be logged
	}
	return body, conn.SetDeadline(time.Time{})
}

func (d *door) prove(conn net.Conn) (version uint32, err error) {
	if err := d.key.Accept(conn, d.magic); err != nil {
		return 0, err
	}
	return dial.ReadGreeting(conn, d.magic)
}

func (d *door) enter(conn net.Conn) *list.Element {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.way.Len() >= d.most {
		oldest := d.way.Front()
		oldest.Value.(net.Conn).Close()
		oldest.Value = nil
		d.way.Remove(oldest)
	}
	return d.way.PushBack(conn)
}

// leave reports whether the connection was not thrown out.
func (d *door) leave(place *list.Element) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if place.Value == nil {
		return false
	}
	d.way.Remove(place)
	return true
}

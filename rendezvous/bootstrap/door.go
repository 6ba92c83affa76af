package bootstrap

import (
	"fmt"
	"net"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/frame"
	"github.com/gohvd/gohvd/internal/serve"
	"github.com/gohvd/gohvd/secret"
)

// door lets in who proves the key.
type door struct {
	key     secret.Secret
	magic   string
	way     *serve.Doorway
	timeout time.Duration // to prove the key and to say what is wanted
}

// meet lets conn in and reads its first frame. What follows goes over the connection that it returns, conn or TLS over it,
// which has no deadline.
func (d *door) meet(conn net.Conn) (net.Conn, []byte, error) {
	conn.SetDeadline(time.Now().Add(d.timeout))
	place := d.way.Enter(conn)
	over, version, err := d.prove(conn)
	if !place.Leave() {
		return nil, nil, serve.ErrCrowded
	}
	if err != nil {
		return nil, nil, fmt.Errorf("not let in: %w", err) // io.EOF if it only looked whether somebody listens
	}
	// Not earlier, so that the other end still tries again if it was thrown out.
	if _, err := over.Write(dial.Greeting(d.magic, protocolVersion)); err != nil {
		return nil, nil, err
	}
	if version != protocolVersion {
		return nil, nil, &dial.VersionError{Got: version, Want: protocolVersion}
	}
	body, err := frame.Read(over, maxControlBytes)
	if err != nil {
		return nil, nil, fmt.Errorf("reading the first frame: %v", err) // not wrapped: io.EOF would not be logged
	}
	return over, body, conn.SetDeadline(time.Time{})
}

func (d *door) prove(conn net.Conn) (over net.Conn, version uint32, err error) {
	if over, err = d.key.Accept(conn, d.magic); err == nil {
		version, err = dial.ReadGreeting(over, d.magic)
	}
	return over, version, err
}

package rendezvous

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/rendezvous/rendezvouspb"
)

// client asks roots to let this process join as the rank in cfg. nonce identifies this call of Join.
type client struct {
	cfg   *JoinConfig
	nonce []byte
	// accepted is set if the connection to the last root has ended while this rank waited for its answer.
	// Then the process of that root has probably ended while its epoch was forming. An answer that the epoch
	// is another one clears it.
	accepted bool
}

// tableGrace is how long a rank still waits for the answer of a root after a newer root was published. The
// old root may have completed its epoch and been closed while the table was in flight. If this rank left at
// once, the epoch would lack a rank. If the host of the old root has vanished, no table arrives, and the rank
// leaves after tableGrace.
const tableGrace = 2 * time.Second

// answerGrace is how long a rank that cannot continue waits for a sign that the process of rank 0 runs. The
// root answers at once, so without an answer rank 0 hangs. The rank may have waited until its time limit, and
// its error should follow within a second.
const answerGrace = 700 * time.Millisecond

// ask asks the root to let this rank join. It waits until the epoch is complete, ctx ends, or the connection
// breaks. newest is a context that ends when there is a newer root or when ctx ends. The error is a
// *RefusedError, a *completeError, errStale, the error of newest, or the error of the connection.
func (c *client) ask(ctx, newest context.Context, root *rendezvouspb.Root) (*Session, error) {
	s, err := c.askRoot(ctx, newest, root)
	if err != nil {
		return nil, fmt.Errorf("joining at the root of rank 0, %s (attempt %d): %w", c.cfg.dialAddr(root),
			root.GetAttempt(), err)
	}
	return s, nil
}

// isAnswer reports whether err is an answer of a root, and not an error of the connection.
func isAnswer(err error) bool {
	_, refused := errors.AsType[*RefusedError](err)
	_, complete := errors.AsType[*completeError](err)
	return refused || complete || errors.Is(err, errStale)
}

func (c *client) askRoot(ctx, newest context.Context, root *rendezvouspb.Root) (*Session, error) {
	request, err := appendMessage(nil, &rendezvouspb.JoinRequest{
		Job: c.cfg.Job, Token: root.GetToken(), Nonce: c.nonce,
		Rank: int32(c.cfg.Rank), Size: int64(c.cfg.Size), LastEpoch: c.cfg.LastEpoch,
		Record: recordToProto(&c.cfg.Self), Terms: c.cfg.Terms,
	})
	if err != nil {
		return nil, err
	}
	orNewest := func(err error) error {
		if newest.Err() != nil {
			return newest.Err()
		}
		return err
	}
	conn, err := dial.Greet(newest, c.cfg.dialAddr(root), c.cfg.Secret.Encrypted(), rootMagic, rootVersion)
	if err != nil {
		return nil, orNewest(err)
	}
	kept := false
	defer func() {
		if !kept {
			conn.Close()
		}
	}()
	conn.SetWriteDeadline(time.Now().Add(answerTimeout))
	if _, err := conn.Write(request); err != nil {
		return nil, orNewest(err)
	}
	answered, left := make(chan struct{}), make(chan struct{})
	stop := context.AfterFunc(newest, func() {
		defer close(left)
		dial.Pause(ctx, tableGrace, answered)
		if ctx.Err() == nil {
			conn.SetDeadline(time.Unix(1, 0))
			return
		}
		conn.SetDeadline(time.Now().Add(answerGrace))
		// The root answers the status TIMEOUT with the list of the ranks for which it waits.
		_ = sendStatus(conn, &rendezvouspb.Status{Kind: rendezvouspb.Status_TIMEOUT})
	})
	ended := sync.OnceFunc(func() {
		close(answered)
		if !stop() {
			<-left
		}
	})
	defer ended()
	in := bufio.NewReader(conn)
	a, err := readAnswer(in)
	if err == nil && a.GetKind() == rendezvouspb.Answer_MOVE {
		if err = sendStatus(conn, c.move(conn, a.GetText())); err == nil {
			a, err = readAnswer(in)
		}
	}
	if err != nil {
		c.accepted = c.accepted || newest.Err() == nil
		return nil, fmt.Errorf("waiting for the other ranks: %w", orNewest(err))
	}
	switch a.GetKind() {
	case rendezvouspb.Answer_TABLE:
		s, err := c.readTable(in, a)
		if err != nil {
			return nil, fmt.Errorf("reading the table: %w", orNewest(err))
		}
		ended()
		conn.SetDeadline(time.Time{})
		kept, s.member = true, newMember(conn, in)
		return s, nil
	case rendezvouspb.Answer_MISSING:
		return nil, &WaitError{decodeRanks(a.GetRanks()), "waiting for " + a.GetText(), ctx.Err()}
	case rendezvouspb.Answer_STALE:
		c.accepted = false
		return nil, errStale
	case rendezvouspb.Answer_COMPLETE:
		c.accepted = false
		return nil, &completeError{a.GetEpoch()}
	case rendezvouspb.Answer_REFUSED:
		return nil, &RefusedError{Reason(a.GetReason()), a.GetText(), decodeRanks(a.GetRanks())}
	default:
		return nil, fmt.Errorf("the root sent an unknown answer of kind %d", a.GetKind())
	}
}

func (c *client) readTable(in *bufio.Reader, a *rendezvouspb.Answer) (*Session, error) {
	if a.GetEpoch() <= c.cfg.LastEpoch {
		return nil, fmt.Errorf("the root formed epoch %d, want an epoch greater than %d", a.GetEpoch(),
			c.cfg.LastEpoch)
	}
	s := &Session{Epoch: a.GetEpoch(), rank: c.cfg.Rank, ring: a.GetRing(),
		Records: make([]Record, c.cfg.Size)}
	s.Records[s.rank] = c.cfg.Self
	last := new(Record)
	for _, i := range sentWith(int(s.rank), c.cfg.Size, s.ring) {
		body, err := dial.ReadFrame(in, maxRecordBytes)
		if err != nil {
			return nil, fmt.Errorf("reading the record of rank %d: %w", i, err)
		}
		if s.Records[i], err = decodeRecord(body); err != nil {
			return nil, fmt.Errorf("malformed record of rank %d: %w", i, err)
		}
		s.Records[i].share(last)
		last = &s.Records[i]
	}
	return s, nil
}

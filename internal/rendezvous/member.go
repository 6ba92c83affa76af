package rendezvous

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/rendezvous/rendezvouspb"
	"github.com/gohvd/gohvd/internal/topo"
)

// FailedError reports that ranks failed during a start, after the epoch was complete but before all ranks
// were ready. All ranks get the same FailedError.
type FailedError struct {
	Epoch uint64
	// Ranks has the ranks that failed, at least one. If one of two ranks failed but it is unknown which one,
	// Ranks has both.
	Ranks []topo.Rank
	// Reason describes the failure, as the root has observed it or as the failed rank has reported it.
	Reason string

	// Silent says that this rank has had no answer of rank 0 in time, and blames it for that alone. On a busy
	// machine, rank 0 may be alive.
	Silent bool

	hang bool // at the root: Ranks hang
}

func newFailure(rank int, reason string) *FailedError {
	return &FailedError{Ranks: []topo.Rank{topo.Rank(rank)}, Reason: reason}
}

func (e *FailedError) Error() string {
	names := make([]string, len(e.Ranks))
	for i, r := range e.Ranks {
		names[i] = fmt.Sprintf("rank %d", r)
	}
	return fmt.Sprintf("%s failed: %s", strings.Join(names, " or "), e.Reason)
}

// outcome is the result of the start of an epoch: whether all ranks have become ready.
type outcome struct {
	done chan struct{} // closed when the start has ended and err has its value
	err  *FailedError  // nil if all ranks are ready
}

func newOutcome() outcome { return outcome{done: make(chan struct{})} }

func (o *outcome) ended() bool {
	select {
	case <-o.done:
		return true
	default:
		return false
	}
}

func (o *outcome) end(err *FailedError) {
	o.err = err
	close(o.done)
}

// member is a rank's connection to the root of its epoch. It is used from the arrival of the table until all
// ranks are ready or the epoch has failed.
type member struct {
	conn     net.Conn
	start    outcome
	tries    *agreement
	reported chan struct{} // closed when the root knows that a rank has reported a failure
}

func newMember(conn net.Conn, in *bufio.Reader) *member {
	m := &member{conn, newOutcome(), newAgreement(), make(chan struct{})}
	go m.listen(in)
	return m
}

// hears reports whether the root answers within the time limit d to a report of a failure.
func (m *member) hears(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-m.reported:
	case <-m.start.done:
	case <-t.C:
		return m.start.ended()
	}
	return true
}

// close closes the connection and waits until listen has ended.
func (m *member) close() {
	_ = m.conn.Close() // ends listen, which closes the connection too
	<-m.start.done
}

// listen receives the root's answers until an answer contains the result of the start. Then it closes the
// connection.
func (m *member) listen(in *bufio.Reader) {
	err := m.receive(in)
	failed, answered := errors.AsType[*FailedError](err)
	if err != nil && !answered {
		failed = newFailure(0, hungUp(err))
	}
	_ = m.conn.Close() // no more data can arrive, so the error does not matter
	m.start.end(failed)
}

func (m *member) receive(in *bufio.Reader) error {
	for {
		a, err := readAnswer(in)
		if err != nil {
			return err
		}
		switch kind := a.GetKind(); {
		case kind == rendezvouspb.Answer_START:
			return nil
		case kind == rendezvouspb.Answer_FAILED && len(a.GetRanks()) > 0:
			return &FailedError{Ranks: decodeRanks(a.GetRanks()), Reason: a.GetText()}
		case kind == rendezvouspb.Answer_STOP || kind == rendezvouspb.Answer_TRIED:
			if err := m.tries.handle(a); err != nil {
				return err
			}
		case kind == rendezvouspb.Answer_REPORT:
			select {
			case <-m.reported:
				return fmt.Errorf("the root sent the answer %v twice", kind)
			default:
				close(m.reported)
			}
		default:
			return fmt.Errorf("the root sent an unknown answer: %v", a)
		}
	}
}

func readAnswer(in io.Reader) (*rendezvouspb.Answer, error) {
	a := new(rendezvouspb.Answer)
	body, err := dial.ReadFrame(in, maxAnswerBytes)
	if err == nil {
		err = proto.Unmarshal(body, a)
	}
	return a, err
}

// readStatus reads a message that a member sends after its request.
func readStatus(in io.Reader) (*rendezvouspb.Status, error) {
	s := new(rendezvouspb.Status)
	body, err := dial.ReadFrame(in, maxStatusBytes)
	if err != nil {
		return s, err
	}
	if err = proto.Unmarshal(body, s); err == nil && (s.GetKind() < rendezvouspb.Status_TIMEOUT ||
		s.GetKind() > rendezvouspb.Status_LEAVES) {
		err = fmt.Errorf("got a status of the unknown kind %v", s.GetKind())
	}
	if err != nil {
		err = fmt.Errorf("reading a status: %w", err)
	}
	return s, err
}

// hungUp returns the text for the failure of a rank whose connection to the root has ended with err.
func hungUp(err error) string {
	const text = "the process closed its connection during Init"
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) {
		return text
	}
	return fmt.Sprintf("%s: %v", text, err)
}

func sendStatus(conn net.Conn, s *rendezvouspb.Status) error {
	f, err := appendMessage(nil, s)
	if err != nil {
		return err
	}
	_, err = conn.Write(f)
	return err
}

func startAnswer(why *FailedError) *rendezvouspb.Answer {
	if why == nil {
		return &rendezvouspb.Answer{Kind: rendezvouspb.Answer_START}
	}
	return &rendezvouspb.Answer{Kind: rendezvouspb.Answer_FAILED, Text: cut(why.Reason, maxTextBytes),
		Ranks: encodeRanks(why.Ranks)}
}

package launch

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/gohvd/gohvd/internal/binding"
	"github.com/gohvd/gohvd/internal/dial"
)

// The launcher and an agent share one connection. On the launcher's own host it is a pipe within the process.
// On another host it is the standard input and output of the command that runs the agent. First the agent
// sends hello. The launcher sends nothing until it has checked the version in hello, because its first order
// contains the job's secret. After that the connection carries a yamux session. The launcher opens its
// streams in this order: the control stream, then standard output and standard error of each rank on the
// host. On the control stream each message is a frame (package dial) with JSON: an order to the agent or a
// notice from it:
//
//	launcher         agent
//	                 hello
//	Job
//	                 Ready, or Refused: the agent cannot start ranks
//	Begin
//	Signal, Force    Report: about one rank
//	Start, Kill
//	                 Over: no process of the ranks is alive
//	                 Bye: all output was sent
//
// The launcher sends Begin when all hosts are ready. If hostJob.Restarts is set, it may send Start for a rank
// whose helper has ended, until it sends Force or a Signal that asks the ranks to end; before that the agent
// does not send Over. Before Start the launcher opens two further streams, for the output of the new process.
// An agent that loses its connection kills its ranks.
//
// Each stream has a window of 256 KiB, which caps how much output waits to be read. A stream with a full
// window does not delay the other streams. If the agent is on another host, each end sends a ping every
// pingInterval. An end that receives nothing for Options.Liveness ends the session.
const (
	agentVersion = 6
	// helloMagic is the beginning of hello. A login may print other text before hello, but does not print
	// this text.
	helloMagic = "\x00hvdrun host agent\x00"
	// maxBannerBytes is the maximum length of the text that a login may print before hello.
	maxBannerBytes = 64 << 10

	maxOrderBytes  = 16 << 20 // large enough for the environment, the largest part of an order
	maxNoticeBytes = 64 << 10

	pingInterval = time.Second
	minLiveness  = 3 * time.Second
)

// order is a message from the launcher to an agent. Exactly one field is set.
type order struct {
	Job    *hostJob       `json:",omitempty"`
	Begin  bool           `json:",omitempty"`
	Signal syscall.Signal `json:",omitempty"` // orders the agent to send it to the process group of each rank
	Force  bool           `json:",omitempty"` // orders the agent to kill the helpers
	Start  *int           `json:",omitempty"` // orders the agent to start the rank with this index on the host again
	Env    words          `json:",omitempty"` // with Start in an elastic job: variables for the new process
	Kill   *int           `json:",omitempty"` // orders the agent to kill the rank with this index on the host

	streams []*stream // the streams that the launcher opens for Start
}

// hostJob tells an agent what to run.
type hostJob struct {
	Dir     words   // the working directory; if empty, the agent keeps its own
	Command words   // the command that every rank runs
	Env     words   // variables for all ranks, added to the environment of the host
	Ranks   []words // further variables for each rank
	// Stores holds addresses of the job's store, best first. The agent tries them and uses the first that
	// works as the address for its ranks. If Stores is empty, the variables in Ranks contain the address.
	// Secret holds one word, the text of the store's secret.
	Stores []string
	Secret words
	// Scheduler says that the scheduler of a parameter server is on the host of the store, so that the agent
	// gives its ranks the address of the scheduler too.
	Scheduler bool
	// BindTo is Options.BindTo. Ranks that are started again are not bound.
	BindTo binding.Unit `json:",omitempty"`
	// Restarts says that the launcher may order the agent to start ranks again.
	Restarts bool
	// Grace is how long the ranks may take to end after SIGTERM if the launcher is gone and the agent has got
	// SIGTERM.
	Grace time.Duration
	// Starter says that the command is Options.Starter, which gets SIGTERM and the time Grace whenever the
	// launcher is gone.
	Starter bool `json:",omitempty"`
}

// notice is a message from an agent to the launcher. Exactly one field besides Rank is set.
type notice struct {
	Ready   bool     `json:",omitempty"`
	Refused *refusal `json:",omitempty"`
	Rank    int      `json:",omitempty"` // index on the host of the rank that Report is about
	Report  *report  `json:",omitempty"`
	Leave   bool     `json:",omitempty"` // the agent got SIGTERM
	Over    bool     `json:",omitempty"`
	Bye     bool     `json:",omitempty"`
}

// refusal says why an agent cannot start its ranks.
type refusal struct {
	Text string
	// If the program was not found or cannot be run, Command is the program, and Status is the exit status
	// that a shell would return. If there is another reason, Command is empty and Status is 0.
	Command string
	Status  int
}

// words is a list of texts without zero bytes. Unlike strings in JSON, the texts need not be UTF-8.
type words []string

func (w words) MarshalJSON() ([]byte, error) {
	var b []byte
	for _, text := range w {
		b = append(append(b, text...), 0)
	}
	return json.Marshal(b)
}

func (w *words) UnmarshalJSON(text []byte) error {
	var b []byte
	err := json.Unmarshal(text, &b)
	*w = nil
	for len(b) > 0 && err == nil {
		var word []byte
		word, b, _ = bytes.Cut(b, []byte{0})
		*w = append(*w, string(word))
	}
	return err
}

// send writes an order or a notice as one frame.
func send(w io.Writer, message any) error {
	body, err := json.Marshal(message)
	if err != nil {
		return err
	}
	_, err = w.Write(dial.SealFrame(append(dial.NewFrame(len(body)), body...)))
	return err
}

// receive reads an order or a notice of at most limit bytes.
func receive(r io.Reader, limit int, message any) error {
	body, err := dial.ReadFrame(r, limit)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, message); err != nil {
		return fmt.Errorf("malformed message: %w", err)
	}
	return nil
}

func hello() []byte { return binary.BigEndian.AppendUint32([]byte(helloMagic), agentVersion) }

// readHello reads until the end of hello and checks its version. It skips text that a login has printed
// before hello.
func readHello(r io.Reader) error {
	var seen []byte
	readByte := func() error {
		var b [1]byte
		_, err := io.ReadFull(r, b[:])
		seen = append(seen, b[0])
		return err
	}
	for !bytes.HasSuffix(seen, []byte(helloMagic)) {
		if len(seen) == maxBannerBytes+len(helloMagic) {
			return fmt.Errorf("got %d bytes without the greeting of an hvdrun agent: %.80q", len(seen), seen)
		}
		if err := readByte(); err != nil {
			if said := bytes.TrimSpace(seen[:len(seen)-1]); err == io.EOF && len(said) > 0 {
				return fmt.Errorf("got %.200q, want the greeting of an hvdrun agent: %w", said, io.EOF)
			}
			return err
		}
	}
	for range 4 {
		if err := readByte(); err != nil {
			return err
		}
	}
	if version := binary.BigEndian.Uint32(seen[len(seen)-4:]); version != agentVersion {
		return fmt.Errorf("got version %d of the agent protocol, want version %d: install the same hvdrun on all hosts",
			version, agentVersion)
	}
	return nil
}

// link is one end of the connection between the launcher and an agent.
type link struct {
	in    io.ReadCloser
	out   io.WriteCloser
	heard atomic.Int64 // when bytes were last received, in nanoseconds since 1970
}

func (l *link) Read(b []byte) (int, error) {
	n, err := l.in.Read(b)
	if n > 0 {
		l.heard.Store(time.Now().UnixNano())
	}
	return n, err
}

// Write never fails and ignores errors. If Write returned an error, yamux would end the session at once and
// lose data that the peer sent before it closed its end. The session ends when that data has been read.
func (l *link) Write(b []byte) (int, error) {
	_, _ = l.out.Write(b)
	return len(b), nil
}

func (l *link) Close() error { return errors.Join(l.out.Close(), l.in.Close()) }

// session is a yamux session that ends if nothing arrives from the peer, and records why it ended.
type session struct {
	*yamux.Session
	liveness time.Duration
	silent   atomic.Bool // nothing has arrived for the time liveness
}

// newSession opens a session by calling open, which is yamux.Client or yamux.Server. The session ends if
// nothing arrives from the peer for the duration liveness. If both ends are in one process, liveness is 0,
// which means no limit.
func newSession(open func(io.ReadWriteCloser, *yamux.Config) (*yamux.Session, error), l *link,
	liveness time.Duration) (*session, error) {
	c := yamux.DefaultConfig()
	c.LogOutput = io.Discard
	c.StreamOpenTimeout, c.StreamCloseTimeout = 0, 0 // no limits, because output may wait for its reader
	// On a slow connection the reply to a ping may wait behind output for a long time. So yamux must not end
	// the session because of a late reply or a slow write.
	c.EnableKeepAlive, c.ConnectionWriteTimeout = false, math.MaxInt64
	y, err := open(l, c)
	if err != nil {
		return nil, err
	}
	s := &session{Session: y, liveness: liveness}
	if liveness > 0 {
		go s.keepAlive(l)
	}
	return s, nil
}

// keepAlive sends a ping every pingInterval. It ends the session when nothing has been received from the peer
// for the time s.liveness. It counts intervals instead of reading the clock, so that time during which this
// process was stopped does not count.
func (s *session) keepAlive(l *link) {
	last, silence := l.heard.Load(), time.Duration(0)
	for silence < s.liveness {
		select {
		case <-s.CloseChan():
			return
		case <-time.After(pingInterval):
		}
		go func() { _, _ = s.Ping() }() // the reply updates heard, as all received bytes do
		silence += pingInterval
		if heard := l.heard.Load(); heard != last {
			last, silence = heard, 0
		}
	}
	s.silent.Store(true)
	s.Close()
}

// reason ends the session and returns the reason for its end. If nothing was received for too long, the
// reason says so. If err says only that the session has ended, reason returns the error that ended the
// session. Otherwise it returns err.
func (s *session) reason(err error) error {
	s.Close()
	if err == io.EOF || errors.Is(err, yamux.ErrSessionShutdown) {
		_, err = s.Accept() // returns at once, because the session is closed; the peer opens no streams here
	}
	if s.silent.Load() {
		return fmt.Errorf("received nothing from the other end for %v", s.liveness)
	}
	return err
}

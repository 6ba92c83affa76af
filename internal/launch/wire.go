package launch

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/frame"
)

// Launcher and agent speak over the agent's standard input and output. The agent says hello, whose version the launcher
// checks before it says anything, since what it says first has the job's secret. Then both send frames (package frame), whose
// first byte is the kind, and each sends one at least each pingInterval.
//
//	launcher                agent
//	                        hello
//	job
//	                        ready, or refused and bye
//	begin
//	signal, force, credit   report, gone, output, closed
//	                        bye
//
// The launcher sends begin when all hosts are ready. An agent whose input ends kills its ranks. What a rank has printed is
// sent as far as the launcher has given credit for the stream, streamWindow bytes at first: so no side ever has more of it,
// neither waits for who reads it, and nothing else waits behind it.
const (
	agentVersion = 1
	// helloMagic is nothing that a login prints: logins may print before the agent says hello.
	helloMagic = "\x00hvdrun host agent\x00"
	// maxBannerBytes bounds what a login prints.
	maxBannerBytes = 64 << 10

	maxOrderBytes  = 16 << 20 // the environment is most of it
	maxAnswerBytes = 64 << 10
	maxTextBytes   = 4 << 10 // of a refusal
	streamWindow   = 64 << 10
	pingInterval   = time.Second
)

// kind is what a frame is.
type kind byte

const (
	kindPing kind = iota
	// Of the launcher.
	kindJob
	kindBegin
	kindSignal
	kindForce
	kindCredit
	// Of the agent.
	kindReady
	kindRefused
	kindReport
	kindGone
	kindOutput
	kindClosed
	kindBye
)

func (k kind) String() string {
	names := [...]string{
		"ping", "job", "begin", "signal", "force", "credit", "ready", "refused", "report", "gone", "output", "closed", "bye",
	}
	if int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("kind %d", byte(k))
}

// hostJob is what the agent is to do.
type hostJob struct {
	Host    string  // the launcher's name for this host
	Dir     words   // one, the directory to run in
	Command words   // of all ranks
	Env     words   // what all ranks get besides this host's own
	Ranks   []words // what each rank gets besides
	// Stores are where the job's store may be reached, the best first, host:port. Secret is the text of its secret, one word, and
	// TLS says that it encrypts.
	Stores []string
	Secret words
	TLS    bool
	// Liveness is how long the launcher may be silent.
	Liveness time.Duration
}

// words are texts without a zero byte, which need not be UTF-8 as JSON wants it.
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

// refusal says why an agent starts no ranks.
type refusal struct {
	Text string
	// Command is what could not be found, if it is that, and Status what a shell gives then.
	Command string
	Status  int
}

// hostReport is a report on the rank with an index on the host.
type hostReport struct {
	Index  int
	Report report
}

// message is a frame that was read. Of its fields only those of its kind count.
type message struct {
	kind    kind
	index   int // of a rank, or twice that and the stream
	signal  syscall.Signal
	credit  int
	text    []byte // of output; belongs to the receiver
	store   string // of ready
	job     hostJob
	refusal refusal
	report  report
}

func hello() []byte { return binary.BigEndian.AppendUint32([]byte(helloMagic), agentVersion) }

// readHello passes over what a login has printed.
func readHello(r io.ByteReader) error {
	var seen []byte
	for len(seen) < len(helloMagic) || string(seen[len(seen)-len(helloMagic):]) != helloMagic {
		if len(seen) == maxBannerBytes+len(helloMagic) {
			return fmt.Errorf("it has printed %d bytes and is no agent of hvdrun: %.80q", len(seen), seen)
		}
		b, err := r.ReadByte()
		if err != nil {
			if said := bytes.TrimSpace(seen); err == io.EOF && len(said) > 0 {
				return fmt.Errorf("it is no agent of hvdrun, and printed %.200q: %w", said, io.EOF)
			}
			return err
		}
		seen = append(seen, b)
	}
	var version uint32
	for range 4 {
		b, err := r.ReadByte()
		if err != nil {
			return err
		}
		version = version<<8 | uint32(b)
	}
	if version != agentVersion {
		return fmt.Errorf("its hvdrun speaks version %d of the agents' protocol, this one %d: have the same hvdrun on all hosts",
			version, agentVersion)
	}
	return nil
}

// The frames.

func encodeKind(k kind) []byte { return frame.Seal(append(frame.New(1), byte(k))) }

func encodeIndex(k kind, index int) []byte {
	return frame.Seal(binary.BigEndian.AppendUint32(append(frame.New(5), byte(k)), uint32(index)))
}

func encodeSignal(index int, s syscall.Signal) []byte {
	f := binary.BigEndian.AppendUint32(append(frame.New(6), byte(kindSignal)), uint32(index))
	return frame.Seal(append(f, byte(s)))
}

func encodeCredit(stream, numBytes int) []byte {
	f := binary.BigEndian.AppendUint32(append(frame.New(9), byte(kindCredit)), uint32(stream))
	return frame.Seal(binary.BigEndian.AppendUint32(f, uint32(numBytes)))
}

func encodeOutput(stream int, text []byte) []byte {
	f := binary.BigEndian.AppendUint32(append(frame.New(5+len(text)), byte(kindOutput)), uint32(stream))
	return frame.Seal(append(f, text...))
}

func encodeJSON(k kind, v any) ([]byte, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return frame.Seal(append(append(frame.New(1+len(body)), byte(k)), body...)), nil
}

// decode reads the body of a frame. Indices are the caller's to check.
func decode(body []byte) (m message, err error) {
	if len(body) == 0 {
		return m, errors.New("an empty frame")
	}
	m.kind, body = kind(body[0]), body[1:]
	want := -1
	switch m.kind {
	case kindPing, kindBegin, kindForce, kindBye:
		want = 0
	case kindGone, kindClosed:
		want = 4
	case kindSignal:
		want = 5
	case kindCredit:
		want = 8
	}
	if want >= 0 && len(body) != want || m.kind == kindOutput && len(body) < 4 {
		return m, fmt.Errorf("a %v of %d bytes, want %d", m.kind, len(body), max(want, 4))
	}
	switch m.kind {
	case kindGone, kindClosed, kindSignal, kindCredit, kindOutput:
		m.index, body = int(binary.BigEndian.Uint32(body)), body[4:]
	}
	switch m.kind {
	case kindPing, kindBegin, kindForce, kindBye, kindGone, kindClosed:
	case kindSignal:
		m.signal = syscall.Signal(body[0])
	case kindCredit:
		m.credit = int(binary.BigEndian.Uint32(body))
	case kindOutput:
		m.text = body
	case kindJob:
		err = json.Unmarshal(body, &m.job)
	case kindReady:
		err = json.Unmarshal(body, &m.store)
	case kindRefused:
		err = json.Unmarshal(body, &m.refusal)
	case kindReport:
		var r hostReport
		err = json.Unmarshal(body, &r)
		m.index, m.report = r.Index, r.Report
		if p := r.Report; err == nil && (p.Code < 0 || p.Code > 255 || p.Signal < 0 || p.Signal > 127 || p.PID < 0) {
			err = fmt.Errorf("got %+v", p)
		}
	default:
		return m, fmt.Errorf("a frame of %v", m.kind)
	}
	if err != nil {
		return m, fmt.Errorf("a %v that cannot be read: %w", m.kind, err)
	}
	return m, nil
}

// errSilent says that the other end was not heard for too long.
var errSilent = errors.New("no sign of life")

// pulse reads from a pipe or socket whose other end sends something each pingInterval.
type pulse struct {
	file *os.File
	// limit, if not 0, is how long it may be silent.
	limit time.Duration
	// heard is when something came last.
	heard time.Time
}

func (p *pulse) Read(b []byte) (int, error) {
	for _, limit := range []time.Duration{p.limit, pingInterval} {
		var deadline time.Time
		if p.limit > 0 {
			deadline = time.Now().Add(limit)
		}
		if err := p.file.SetReadDeadline(deadline); err != nil {
			return 0, err
		}
		n, err := p.file.Read(b)
		if n > 0 {
			p.heard = time.Now()
			return n, nil
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return 0, err
		}
		// This process may have been stopped itself, and the other end's words lie there unread: look once more.
	}
	return 0, fmt.Errorf("%w for %v", errSilent, p.limit)
}

// own makes a file of this process's own of a descriptor, one whose reads and writes can have deadlines where that is
// possible. The descriptor itself then is that of another file.
func own(fd, instead int, name string) (*os.File, error) {
	mine, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	if err := unix.Dup3(instead, fd, 0); err != nil {
		unix.Close(mine)
		return nil, os.NewSyscallError("dup3", err)
	}
	if err := unix.SetNonblock(mine, true); err != nil {
		unix.Close(mine)
		return nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(mine), name), nil
}

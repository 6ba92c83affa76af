package bootstrap

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// pmiKey is the key under which rank 0 publishes its announcement.
const pmiKey = "gohvd-meet"

// meetByPMI meets through the key-value space that the launcher provides.
func (e *Env) meetByPMI(ctx context.Context, o MeetOptions, m *Place) error {
	p, err := startPMI(ctx, e.pmiFD)
	if err != nil {
		return err
	}
	defer p.close()
	if m.JobID == "" {
		m.JobID = p.space
	}
	if e.Rank == 0 {
		text, err := e.announce(ctx, o, m)
		if err != nil {
			return err
		}
		if err := p.put(pmiKey, text); err != nil {
			return err
		}
	}
	if err := p.barrier(); err != nil {
		return err
	}
	if e.Rank != 0 {
		text, err := p.get(pmiKey)
		if err != nil {
			return err
		}
		if err := e.dialAnnounced(ctx, o, m, text); err != nil {
			return err
		}
	}
	return p.finalize()
}

// maxPMILine is the maximum length of a line in bytes. MPICH allows at most 1024 bytes for a value in the
// line.
const maxPMILine = 8 << 10

// pmi is a client of PMI-1, the protocol between a process and MPICH's mpiexec. A request is one line of
// words, and its first word is cmd=NAME. The answer is one line too. See src/pmi, simple_pmi.c in MPICH.
type pmi struct {
	ctx   context.Context
	fd    int
	conn  net.Conn
	in    *bufio.Reader
	stop  func() bool
	space string // name of the job's key-value space
	// maxKey and maxValue are the launcher's limits for the lengths of a key and of a value.
	maxKey, maxValue int
}

// startPMI starts the protocol on the descriptor fd, whose number is in PMI_FD. All calls fail when ctx ends.
//
// fd is never closed, so that its number is not reused for another file. close shuts the socket down, so that
// later use of fd fails.
func startPMI(ctx context.Context, fd int) (*pmi, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("PMI_FD is %d: %w", fd, err)
	}
	f := os.NewFile(uintptr(dup), "PMI_FD")
	conn, err := net.FileConn(f)
	f.Close()
	if err != nil {
		return nil, fmt.Errorf("PMI_FD is %d, want a socket: %w", fd, err)
	}
	p := &pmi{ctx: ctx, fd: fd, conn: conn, in: bufio.NewReaderSize(conn, maxPMILine)}
	p.stop = context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	if err := p.start(); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func (p *pmi) start() error {
	answer, err := p.call("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init")
	if err != nil {
		return err
	}
	if v := answer["pmi_version"]; v != "1" {
		return fmt.Errorf("pmi: init: the launcher speaks version %s of PMI, want 1", quote(v))
	}
	if answer, err = p.call("cmd=get_maxes", "maxes"); err != nil {
		return err
	}
	for name, to := range map[string]*int{"keylen_max": &p.maxKey, "vallen_max": &p.maxValue} {
		if *to, err = decimal(answer[name], 1<<30); err != nil {
			return fmt.Errorf("pmi: get_maxes: %s: %w", name, err)
		}
	}
	if answer, err = p.call("cmd=get_my_kvsname", "my_kvsname"); err != nil {
		return err
	}
	p.space = answer["kvsname"]
	if p.space == "" {
		return errors.New("pmi: get_my_kvsname: the launcher gave no name")
	}
	return nil
}

// put sets key to value. Neither may contain white space. Other ranks can read the value after the next
// barrier.
func (p *pmi) put(key, value string) error {
	// The launcher's limits include the zero byte at the end of a C string.
	if len(key) >= p.maxKey || len(value) >= p.maxValue {
		return fmt.Errorf("pmi: put: the key has %d bytes and the value has %d bytes, want less than %d and less than %d", len(key),
			len(value),
			p.maxKey, p.maxValue)
	}
	_, err := p.call("cmd=put kvsname="+p.space+" key="+key+" value="+value, "put_result")
	return err
}

// barrier waits until all ranks have called it.
func (p *pmi) barrier() error {
	_, err := p.call("cmd=barrier_in", "barrier_out")
	return err
}

func (p *pmi) get(key string) (string, error) {
	answer, err := p.call("cmd=get kvsname="+p.space+" key="+key, "get_result")
	if err != nil {
		return "", err
	}
	value, ok := answer["value"]
	if !ok {
		return "", fmt.Errorf("pmi: get: the launcher has no value for %s", key)
	}
	return value, nil
}

// finalize tells the launcher that this process is done. If a process ends without it, the launcher assumes
// that the process has crashed.
func (p *pmi) finalize() error {
	_, err := p.call("cmd=finalize", "finalize_ack")
	return err
}

func (p *pmi) close() {
	p.stop()
	// Shutdown fails if the launcher has closed its end. The error does not matter.
	_ = unix.Shutdown(p.fd, unix.SHUT_RDWR)
	p.conn.Close()
}

// call sends a request and reads the answer. The word cmd of the answer must be the string want. Errors
// contain the name of the request, but nothing else of the request or of the answer, because they may contain
// a secret.
func (p *pmi) call(request, want string) (map[string]string, error) {
	name, _, _ := strings.Cut(strings.TrimPrefix(request, "cmd="), " ")
	answer, err := p.exchange(request)
	if err != nil {
		if p.ctx.Err() != nil {
			err = p.ctx.Err()
		}
		return nil, fmt.Errorf("pmi: %s: %w", name, err)
	}
	if answer["cmd"] != want {
		return nil, fmt.Errorf("pmi: %s: the launcher answered cmd=%s, want %s", name, quote(answer["cmd"]),
			want)
	}
	if rc, ok := answer["rc"]; ok && rc != "0" {
		return nil, fmt.Errorf("pmi: %s: the launcher refused: rc=%s msg=%s", name, quote(rc),
			quote(answer["msg"]))
	}
	return answer, nil
}

func (p *pmi) exchange(request string) (map[string]string, error) {
	if _, err := p.conn.Write([]byte(request + "\n")); err != nil {
		return nil, err
	}
	line, err := p.in.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		return nil, fmt.Errorf("the launcher sent a line of more than %d bytes", maxPMILine)
	}
	if err != nil {
		return nil, err
	}
	return parsePMI(string(line)), nil
}

// parsePMI splits a line into words of the form name=value, and returns a map from names to values. If a word
// contains no =, its value is empty.
func parsePMI(line string) map[string]string {
	words := make(map[string]string)
	for word := range strings.FieldsSeq(line) {
		name, value, _ := strings.Cut(word, "=")
		words[name] = value
	}
	return words
}

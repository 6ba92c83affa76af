package shm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sync"
	"syscall"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
)

// agreeLane is the lane on which ranks agree. No process set gets that far.
const agreeLane = transport.Lane(math.MaxUint32)

// Frames of the agreement: kind u8 | length of body u32 | body (little-endian).
const (
	// reportFrame goes to the centre: the body is what went wrong at this rank, empty if nothing did.
	reportFrame = 1 + iota
	// stoppedFrame goes to the centre instead, from a rank that was told to stop.
	stoppedFrame
	// complaintFrame goes to the centre instead: the body is what went wrong with another rank. It counts if no rank has a report.
	complaintFrame
	// stopFrame comes from the centre: a rank of this host has failed, do not wait for the others.
	stopFrame
	// verdictFrame comes from the centre, last: count u32, then for each rank that failed, ascending,
	// rank u32 | length u16 | what went wrong.
	verdictFrame
)

const (
	// maxTextBytes bounds what a rank may say about its failure.
	maxTextBytes   = 512
	frameHeadBytes = 5
)

// errStopped ends the setting up at a rank whose host has failed elsewhere.
var errStopped = errors.New("shm: another rank of this host has failed")

// failures are the ranks at which setting up failed by itself, and how.
type failures map[topo.Rank]string

// agreement is one rank's part in finding the failures of all partners. It is a star: the lowest partner is its centre.
// A rank that fails says so at once, and the ranks of its host are then told to stop, so that nobody waits for what will
// not come. A partner that dies is a failure of its own; if the centre dies, Connect fails.
type agreement struct {
	rank     topo.Rank
	hosts    []string
	partners []topo.Rank // ascending, with rank
	under    transport.Mesh
	// done has how setting up ended at this rank, once; stop makes it end with errStopped.
	done <-chan error
	stop func()
}

// run returns when the verdict is there, and known to all whom it can reach, or ctx has ended.
func (a *agreement) run(ctx context.Context) (failures, error) {
	defer a.under.Release(agreeLane)
	// A Conn knows no context: the lane has to end with it.
	defer context.AfterFunc(ctx, func() { a.under.Abort(agreeLane, context.Cause(ctx)) })()
	if a.rank == a.partners[0] {
		return a.lead(ctx)
	}
	return a.follow(ctx)
}

// heard is a report, or why there is none.
type heard struct {
	from      topo.Rank
	text      string
	stopped   bool
	complaint bool
	err       error
}

// isComplaint reports whether setting up has failed at a rank because of another one.
func isComplaint(err error) bool { return dial.MayRecover(err) || errors.Is(err, syscall.ENOENT) }

// lead is the centre's part.
func (a *agreement) lead(ctx context.Context) (failures, error) {
	reports := make(chan heard, len(a.partners))
	conns := make(map[topo.Rank]transport.Conn)
	var mu sync.Mutex // guards conns and told
	told := make(map[string]bool)
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, r := range a.partners[1:] {
		wg.Go(func() {
			c, err := a.under.Conn(ctx, agreeLane, r)
			if err != nil {
				reports <- heard{from: r, err: err}
				return
			}
			mu.Lock()
			conns[r] = c
			late := told[a.hosts[r]]
			mu.Unlock()
			if late {
				err = c.Send(frame(stopFrame, nil))
			}
			if err == nil {
				reports <- readReport(c, r)
				return
			}
			reports <- heard{from: r, err: err}
		})
	}
	own := a.done
	failed, complaints := make(failures), make(failures)
	for waiting := len(a.partners); waiting > 0; {
		var h heard
		select {
		case err := <-own:
			own, h = nil, heard{from: a.rank, stopped: errors.Is(err, errStopped)}
			if err != nil {
				h.text, h.complaint = cut(err.Error()), isComplaint(err)
			}
		case h = <-reports:
		}
		if err := ctx.Err(); err != nil && (h.err != nil || h.from == a.rank && h.text != "") {
			a.stop()
			if own != nil {
				<-own
			}
			return nil, fmt.Errorf("shm: agree: rank %d has not reported: %w", h.from, err)
		}
		waiting--
		switch {
		case dial.IsExhausted(h.err):
			h.from, h.text = a.rank, cut(h.err.Error())
		case h.err != nil:
			h.text = cut("no report: " + h.err.Error())
		}
		if h.text == "" || h.stopped {
			continue
		}
		if h.complaint {
			complaints[h.from] = h.text
		} else {
			failed[h.from] = h.text
		}
		a.halt(a.hosts[h.from], conns, told, &mu)
	}
	if len(failed) == 0 {
		failed = complaints
	}
	text := encodeFailures(failed)
	mu.Lock()
	defer mu.Unlock()
	for _, r := range a.partners[1:] {
		// A rank that cannot be told is dead, and somebody notices that on the Control lane.
		if c := conns[r]; c != nil && c.Send(frame(verdictFrame, text)) == nil {
			_ = c.Flush()
		}
	}
	return failed, ctx.Err()
}

// halt stops setting up at the ranks of host, also at those whose channels are not there yet.
func (a *agreement) halt(host string, conns map[topo.Rank]transport.Conn, told map[string]bool, mu *sync.Mutex) {
	mu.Lock()
	defer mu.Unlock()
	if told[host] {
		return
	}
	told[host] = true
	for r, c := range conns {
		if a.hosts[r] == host {
			_ = c.Send(frame(stopFrame, nil)) // a failure shows in its report
		}
	}
	if a.hosts[a.rank] == host {
		a.stop()
	}
}

// follow is the part of all but the centre.
func (a *agreement) follow(ctx context.Context) (failures, error) {
	centre := a.partners[0]
	var f failures
	verdict := make(chan error, 1)
	c, err := a.under.Conn(ctx, agreeLane, centre)
	if err == nil {
		go func() {
			var err error
			f, err = a.listen(c)
			verdict <- err
		}()
		select {
		case err = <-verdict: // before the report
			if err == nil {
				err = errVerdict
			}
			a.stop()
			<-a.done
		case err = <-a.done:
			kind, text := byte(reportFrame), ""
			if errors.Is(err, errStopped) {
				kind = stoppedFrame
			} else if err != nil {
				text = cut(err.Error())
				if isComplaint(err) {
					kind = complaintFrame
				}
			}
			err = c.Send(frame(kind, []byte(text)))
			if err == nil {
				err = c.Flush()
			}
			// Not the failure to send: what the centre said before it left says more.
			if end := <-verdict; err == nil || end == nil {
				err = end
			}
		}
	} else {
		a.stop()
		<-a.done
	}
	if err == nil {
		return f, nil
	}
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return nil, fmt.Errorf("shm: agree with rank %d: %w", centre, err)
}

// listen hears the centre until the verdict.
func (a *agreement) listen(c transport.Conn) (failures, error) {
	for {
		kind, body, err := readFrame(c, maxVerdictBytes(len(a.hosts)))
		switch {
		case err != nil:
			return nil, err
		case kind == stopFrame && len(body) == 0:
			a.stop()
		case kind == verdictFrame:
			return decodeFailures(body, len(a.hosts))
		default:
			return nil, fmt.Errorf("frame of kind %d with %d bytes from the centre", kind, len(body))
		}
	}
}

// readReport waits for what a partner says.
func readReport(c transport.Conn, from topo.Rank) heard {
	kind, body, err := readFrame(c, maxTextBytes)
	switch {
	case err != nil:
		return heard{from: from, err: err}
	case kind == reportFrame:
		return heard{from: from, text: string(body)}
	case kind == complaintFrame && len(body) > 0:
		return heard{from: from, text: string(body), complaint: true}
	case kind == stoppedFrame && len(body) == 0:
		return heard{from: from, stopped: true}
	default:
		return heard{from: from, err: fmt.Errorf("frame of kind %d with %d bytes instead of a report", kind, len(body))}
	}
}

func frame(kind byte, body []byte) []byte {
	b := binary.LittleEndian.AppendUint32([]byte{kind}, uint32(len(body)))
	return append(b, body...)
}

func readFrame(r io.Reader, maxBytes int) (kind byte, body []byte, err error) {
	var head [frameHeadBytes]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	n := binary.LittleEndian.Uint32(head[1:])
	if int64(n) > int64(maxBytes) {
		return 0, nil, fmt.Errorf("frame of kind %d with %d bytes, want at most %d", head[0], n, maxBytes)
	}
	body = make([]byte, n)
	_, err = io.ReadFull(r, body)
	return head[0], body, err
}

func cut(text string) string { return text[:min(len(text), maxTextBytes)] }

func maxVerdictBytes(ranks int) int { return 4 + ranks*(4+2+maxTextBytes) }

func encodeFailures(f failures) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(f)))
	for _, r := range f.ranks() {
		b = binary.LittleEndian.AppendUint32(b, uint32(r))
		b = binary.LittleEndian.AppendUint16(b, uint16(len(f[r])))
		b = append(b, f[r]...)
	}
	return b
}

var errVerdict = errors.New("malformed verdict")

// decodeFailures reads the body of a verdict over ranks below size.
func decodeFailures(b []byte, size int) (failures, error) {
	if len(b) < 4 {
		return nil, errVerdict
	}
	n := binary.LittleEndian.Uint32(b)
	b = b[4:]
	f := make(failures)
	for last := int64(-1); n > 0; n-- {
		if len(b) < 6 {
			return nil, errVerdict
		}
		r, length := binary.LittleEndian.Uint32(b), int(binary.LittleEndian.Uint16(b[4:]))
		b = b[6:]
		if int64(r) <= last || int64(r) >= int64(size) || length == 0 || length > maxTextBytes || length > len(b) {
			return nil, errVerdict
		}
		f[topo.Rank(r)] = string(b[:length])
		b, last = b[length:], int64(r)
	}
	if len(b) > 0 {
		return nil, errVerdict
	}
	return f, nil
}

// ranks are those that failed, ascending.
func (f failures) ranks() []topo.Rank {
	var all []topo.Rank
	for r := range f {
		all = append(all, r)
	}
	slices.Sort(all)
	return all
}

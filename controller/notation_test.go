package controller_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// The functions in this file format and parse frames (message.Up, message.Down) in the notation of the
// example in docs/negotiation.md. The scripts use the notation for their output and for the forged frames in
// their commands.

func upText(from topo.Rank, u *message.Up) string { return fmt.Sprintf("%d->0 %v", from, u) }

// downText formats a frame from the coordinator to the given ranks, in a job of the given size. If the frame
// goes to all ranks, the text begins with "0->*".
func downText(to []topo.Rank, size int, d *message.Down) string {
	return fmt.Sprintf("0->%s %v", ranksText(to, size), d)
}

// kindText returns the name of a kind with dashes instead of spaces.
func kindText(k message.Kind) string { return strings.ReplaceAll(k.String(), " ", "-") }

func ranksText(ranks []topo.Rank, size int) string {
	if len(ranks) == size {
		return "*"
	}
	ranks = slices.Clone(ranks)
	slices.Sort(ranks)
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(ranks), " ", ","), "[]")
}

// fields splits a line at spaces, but not at spaces within brackets.
func fields(line string) []string {
	depth := 0
	return strings.FieldsFunc(line, func(r rune) bool {
		switch r {
		case '[':
			depth++
		case ']':
			depth--
		}
		return r == ' ' && depth == 0
	})
}

// parseRequests parses text such as "allreduce g0,g1 float32[4 4] op=min root=1", which stands for one
// request for each name. It returns the requests and the fields of the line that it has not used.
func parseRequests(f []string) (qs []message.Request, rest []string, err error) {
	if len(f) < 2 {
		return nil, nil, fmt.Errorf("want a kind and a name, got %q", f)
	}
	var q message.Request
	for k := message.Allreduce; k.Valid(); k++ {
		if kindText(k) == f[0] {
			q.Kind = k
		}
	}
	names := f[1]
	f = f[2:]
	if q.Kind.Reduces() {
		q.Op, q.Prescale, q.Postscale = tensor.Sum, 1, 1
	}
	if q.Kind.MovesData() && len(f) > 0 && !strings.HasPrefix(f[0], "parts=") {
		if q.DType, q.Shape, err = parseTensor(f[0]); err != nil {
			return nil, nil, err
		}
		f = f[1:]
	}
options:
	for len(f) > 0 {
		key, value, _ := strings.Cut(f[0], "=")
		switch key {
		case "op":
			q.Op = tensor.NoReduce
			for op := tensor.Average; op.Valid(); op++ {
				if op.String() == value {
					q.Op = op
				}
			}
		case "prescale":
			q.Prescale, err = strconv.ParseFloat(value, 64)
		case "postscale":
			q.Postscale, err = strconv.ParseFloat(value, 64)
		case "root":
			var root int
			root, err = strconv.Atoi(value)
			q.Root = topo.Rank(root)
		case "wire":
			q.Wire = parseDType(value)
		case "device":
			var index int
			index, err = strconv.Atoi(strings.TrimPrefix(value, "cuda:"))
			q.Device = tensor.CUDA(index)
		case "group":
			var size int
			q.Group, value, _ = strings.Cut(value, "/")
			size, err = strconv.Atoi(value)
			q.GroupSize = int32(size)
		case "parts":
			err = parseParts(&q, value)
		case "empty":
			q.Empty = true
		case "ranks":
			q.Ranks, err = parseRanks(value, message.MaxRanks)
		case "members-only":
			q.MembersOnly = true
		case "id":
			var id int
			id, err = strconv.Atoi(value)
			q.Set = topo.ProcessSetID(id)
		default:
			break options
		}
		if err != nil {
			return nil, nil, err
		}
		f = f[1:]
	}
	for name := range strings.SplitSeq(names, ",") {
		q.Name = name
		if err := q.Check(); err != nil {
			return nil, nil, err
		}
		qs = append(qs, q)
	}
	return qs, f, nil
}

// parseTensor parses an element type and a shape, such as "float32[4 4]".
func parseTensor(text string) (dt tensor.DType, shape tensor.Shape, err error) {
	open := strings.IndexByte(text, '[')
	if open < 0 {
		return dt, nil, fmt.Errorf("want type and shape as float32[4 4], got %q", text)
	}
	for _, d := range strings.Fields(strings.Trim(text[open:], "[]")) {
		n, err := strconv.ParseInt(d, 10, 64)
		if err != nil {
			return dt, nil, err
		}
		shape = append(shape, n)
	}
	return parseDType(text[:open]), shape, nil
}

// parseParts makes q a request for a group. The text lists the tensors of the group, such as "float32[4
// 4],int64[2]".
func parseParts(q *message.Request, text string) error {
	var elems int64
	for part := range strings.SplitSeq(text, ",") {
		dt, shape, err := parseTensor(part)
		if err != nil {
			return err
		}
		n, err := shape.NumElems()
		if err != nil {
			return err
		}
		elems += n
		q.Parts = q.Parts.Append(dt, shape)
	}
	q.DType, q.Shape = q.Parts.DType(), tensor.Shape{elems}
	return nil
}

func parseDType(text string) tensor.DType {
	for _, dt := range tensor.DTypes() {
		if dt.String() == text {
			return dt
		}
	}
	return tensor.Invalid
}

// parseTuning parses the text that Down.String prints after "tune". Values that the text does not have are
// those of the cluster's configuration.
func (c *cluster) parseTuning(f []string) (t message.Tuning, err error) {
	t.FusionThresholdBytes, t.CycleTime = c.cfg.FusionThresholdBytes, c.cfg.CycleTime
	for _, word := range f {
		key, value, _ := strings.Cut(word, "=")
		switch key {
		case "fusion":
			t.FusionThresholdBytes, err = strconv.ParseInt(value, 10, 64)
		case "cycle":
			t.CycleTime, err = time.ParseDuration(value)
		case "segment":
			t.SegmentBytes, err = strconv.Atoi(value)
		case "cache-off":
			t.CacheOff = true
		default:
			err = fmt.Errorf("unknown word %q", word)
		}
		if err != nil {
			return t, err
		}
	}
	return t, nil
}

// parseUp parses the text that upText prints after "1->0".
func parseUp(f []string) (*message.Up, error) {
	u := new(message.Up)
	switch f[0] {
	case "up":
		u.Type = message.UpNews
	case "bye":
		u.Type = message.UpBye
	case "suspect":
		u.Type = message.UpSuspect
	case "heartbeat":
		u.Type = message.UpHeartbeat
	default:
		return nil, fmt.Errorf("unknown frame %q", f[0])
	}
	var set *message.UpSet
	for f = f[1:]; len(f) > 0; f = f[1:] {
		key, value, _ := strings.Cut(f[0], "=")
		base := 10
		if key == "hits" || key == "invalid" {
			base = 16
		}
		var n uint64
		if value != "" {
			var err error
			if n, err = strconv.ParseUint(value, base, 64); err != nil {
				return nil, err
			}
		}
		if set == nil && slices.Contains([]string{"hits", "invalid", "done", "request"}, key) {
			return nil, fmt.Errorf("%s before set=", key)
		}
		switch key {
		case "seen":
			u.Seen = n
		case "rank":
			u.Suspects, u.Reason = []topo.Rank{topo.Rank(n)}, strings.Join(f[1:], " ")
			return u, nil
		case "shutdown":
			u.Shutdown = true
		case "set":
			set = u.At(topo.ProcessSetID(n))
		case "hits":
			set.Hits = message.Bits{n}
		case "invalid":
			set.Invalid = message.Bits{n}
		case "done":
			set.Done = uint32(n)
		case "request":
			qs, rest, err := parseRequests(f[1:])
			if err != nil {
				return nil, err
			}
			set.Requests = append(set.Requests, qs...)
			f = append([]string{""}, rest...)
		default:
			return nil, fmt.Errorf("unknown field %q", f[0])
		}
	}
	return u, nil
}

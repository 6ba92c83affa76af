package controller_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/topo"
)

// The notation of NEGOTIATION's golden, in which scripts print frames and forge them. Vectors of bits are hexadecimal
// numbers (bit 0 is 1), lists of bits are lists.

func upText(from topo.Rank, u *message.Up) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d->0 %s seen=%d", from, [...]string{"?", "up", "heartbeat", "bye", "suspect", "timeout", "released"}[u.Type], u.Seen)
	switch u.Type {
	case message.UpSuspect:
		fmt.Fprintf(&b, " rank=%d %s", u.Suspect, u.Reason)
	case message.UpReleased:
		fmt.Fprintf(&b, " rank=%d", u.Suspect)
	}
	if u.Tensor != "" && !u.Shutdown {
		fmt.Fprintf(&b, " set=%d %s %v", u.Set, u.Tensor, time.Duration(u.Millis)*time.Millisecond)
	}
	if u.Granted {
		b.WriteString(" granted")
	}
	for i := range u.Sets {
		s := &u.Sets[i]
		fmt.Fprintf(&b, " set=%d", s.Set)
		if s.Hits.Any() {
			fmt.Fprintf(&b, " hits=%s", vectorText(s.Hits))
		}
		if s.Invalid.Any() {
			fmt.Fprintf(&b, " invalid=%s", vectorText(s.Invalid))
		}
		for j := range s.Requests {
			fmt.Fprintf(&b, " request %s", requestText(&s.Requests[j]))
		}
		if s.Done > 0 {
			fmt.Fprintf(&b, " done=%d", s.Done)
		}
	}
	if u.Shutdown {
		b.WriteString(" shutdown")
		if u.Operations > 0 {
			fmt.Fprintf(&b, " after %d, %s %dms ago", u.Operations, u.Tensor, u.Millis)
		}
		if u.Reason != "" {
			fmt.Fprintf(&b, " (%s)", u.Reason)
		}
	}
	return b.String()
}

func vectorText(v message.Bits) string {
	text := ""
	for i := len(v) - 1; i >= 0; i-- {
		if text == "" && v[i] != 0 {
			text = strconv.FormatUint(v[i], 16)
		} else if text != "" {
			text += fmt.Sprintf("%016x", v[i])
		}
	}
	return text
}

// kindText is a kind in one word.
func kindText(k message.Kind) string { return strings.ReplaceAll(k.String(), " ", "-") }

// requestText prints a request; what is usual (sum, factors 1) is left out.
func requestText(q *message.Request) string {
	text := fmt.Sprintf("%s %s", kindText(q.Kind), q.Name)
	switch {
	case len(q.Parts) > 0:
		text += " parts="
		for i := range q.Parts.Len() {
			dt, shape := q.Parts.At(i)
			text += fmt.Sprintf("%s%v%v", strings.Repeat(",", min(i, 1)), dt, shape)
		}
	case q.Kind.MovesData():
		text += fmt.Sprintf(" %v%v", q.DType, q.Shape)
	}
	switch q.Kind {
	case message.Join:
		if q.Empty {
			text += " empty"
		}
	case message.AddProcessSet:
		text += " ranks=" + listText(q.Ranks)
	case message.RemoveProcessSet:
		text += fmt.Sprintf(" id=%d", q.Set)
	case message.Broadcast:
		text += fmt.Sprintf(" root=%d", q.Root)
	case message.Allreduce, message.Reducescatter:
		if q.Op != tensor.Sum {
			text += fmt.Sprintf(" op=%v", q.Op)
		}
		if q.Prescale != 1 {
			text += fmt.Sprintf(" prescale=%v", q.Prescale)
		}
		if q.Postscale != 1 {
			text += fmt.Sprintf(" postscale=%v", q.Postscale)
		}
		if q.Wire.Valid() {
			text += fmt.Sprintf(" wire=%v", q.Wire)
		}
	}
	if q.Group != "" {
		text += fmt.Sprintf(" group=%s/%d", q.Group, q.GroupSize)
	}
	return text
}

// downText prints a frame to some of size ranks: "0->*" if to all.
func downText(to []topo.Rank, size int, d *message.Down) string {
	var b strings.Builder
	fmt.Fprintf(&b, "0->%s ", ranksText(to, size))
	switch d.Type {
	case message.DownHeartbeat:
		b.WriteString("heartbeat")
		return b.String()
	case message.DownClose:
		b.WriteString("close")
		return b.String()
	case message.DownLeft:
		fmt.Fprintf(&b, "left ranks=%s", ranksText(d.Ranks, -1))
		return b.String()
	case message.DownFail:
		fmt.Fprintf(&b, "fail ranks=%s %s", ranksText(d.Ranks, -1), d.Reason)
		return b.String()
	}
	fmt.Fprintf(&b, "down n=%d", d.Cycle)
	for i := range d.Sets {
		s := &d.Sets[i]
		fmt.Fprintf(&b, " set=%d", s.Set)
		for g := range s.Grants {
			b.WriteString(" " + grantText(&s.Grants[g]))
		}
		if len(s.Erase) > 0 {
			fmt.Fprintf(&b, " erase=%s", listText(s.Erase))
		}
		for j, p := range s.Puts {
			if j == 0 {
				b.WriteString(" put")
			}
			fmt.Fprintf(&b, " %s=%d", s.Grants[p.Grant].Full[p.Tensor].Name, p.Bit)
		}
	}
	if d.Stop {
		b.WriteString(" stop")
	}
	if d.Reason != "" {
		fmt.Fprintf(&b, " (%s)", d.Reason)
	}
	return b.String()
}

func grantText(g *message.Grant) string {
	text := "grant"
	if len(g.Full) > 0 {
		text += " " + kindText(g.Full[0].Kind)
	}
	if len(g.Bits) > 0 {
		text += " bits=" + listText(g.Bits)
	}
	for i, r := range g.Full {
		sep := "+"
		if i == 0 {
			sep = " "
		}
		text += sep + r.Name
	}
	if g.Backend != message.NoBackend {
		text += fmt.Sprintf(" %v/%v", g.Backend, g.Algorithm)
	}
	if len(g.Absent) > 0 {
		text += " absent=" + listText(g.Absent)
	}
	for _, r := range g.Full {
		switch r.Kind {
		case message.Join:
			text += fmt.Sprintf(" last=%d", r.Root)
		case message.AddProcessSet:
			text += fmt.Sprintf(" id=%d ranks=%s", r.Set, listText(r.Ranks))
		case message.RemoveProcessSet:
			text += fmt.Sprintf(" id=%d", r.Set)
		case message.Error:
			text += fmt.Sprintf(" (%s)", r.Text)
		case message.Allgather:
			text += fmt.Sprintf(" dims=%v", tensor.Shape(r.FirstDims))
		}
	}
	return text
}

func listText[T ~uint32 | ~int32](v []T) string {
	var parts []string
	for _, x := range v {
		parts = append(parts, fmt.Sprint(x))
	}
	return strings.Join(parts, ",")
}

func ranksText(ranks []topo.Rank, size int) string {
	if len(ranks) == size {
		return "*"
	}
	ranks = slices.Clone(ranks)
	slices.Sort(ranks)
	return listText(ranks)
}

// fields splits at blanks outside brackets.
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

// parseRequests reads "allreduce g0,g1 float32[4 4] op=min root=1": one request per name. It gives back what it
// did not read.
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

// parseTensor reads "float32[4 4]".
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

// parseParts makes q a group that is one request, of tensors "float32[4 4],int64[2]".
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

// parseUp reads what upText prints, after "1->0".
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
			u.Suspect, u.Reason = topo.Rank(n), strings.Join(f[1:], " ")
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

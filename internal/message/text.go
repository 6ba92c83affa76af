package message

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/tensor"
)

var upTypes = [...]string{"?", "up", "heartbeat", "bye", "suspect", "timeout", "released", "lost", "fault"}

func (t UpType) String() string {
	if int(t) >= len(upTypes) {
		return fmt.Sprintf("UpType(%d)", uint8(t))
	}
	return upTypes[t]
}

// String formats the frame for logs and for the controller's golden tests. It prints a bit vector as a
// hexadecimal number, in which bit 0 has the value 1.
func (u *Up) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v seen=%d", u.Type, u.Seen)
	switch u.Type {
	case UpSuspect:
		if u.Set != 0 {
			fmt.Fprintf(&b, " set=%d", u.Set)
		}
		fmt.Fprintf(&b, " rank=%s %s", listText(u.Suspects), u.Reason)
	case UpLost, UpFault:
		fmt.Fprintf(&b, " rank=%d %s", u.Suspect, u.Reason)
	case UpReleased:
		fmt.Fprintf(&b, " ranks=%s", listText(u.Released))
	}
	if u.Tensor != "" && !u.Shutdown {
		fmt.Fprintf(&b, " set=%d %s %v", u.Set, u.Tensor, time.Duration(u.Millis)*time.Millisecond)
	}
	if u.Message {
		fmt.Fprintf(&b, " message rank=%d", u.Suspect)
	}
	if u.Granted {
		b.WriteString(" granted")
	}
	for i := range u.Sets {
		s := &u.Sets[i]
		fmt.Fprintf(&b, " set=%d", s.Set)
		if s.Hits.Any() {
			fmt.Fprintf(&b, " hits=%v", s.Hits)
		}
		if s.Invalid.Any() {
			fmt.Fprintf(&b, " invalid=%v", s.Invalid)
		}
		for j := range s.Requests {
			fmt.Fprintf(&b, " request %v", &s.Requests[j])
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
		b.WriteString(channelText(u.Channels))
	}
	return b.String()
}

// channelText formats channels as " channels=" and the set and the rank of each.
func channelText(channels []Channel) string {
	text := ""
	for i, c := range channels {
		text += fmt.Sprintf("%s%d/%d", [...]string{" channels=", ","}[min(i, 1)], c.Set, c.Rank)
	}
	return text
}

// String formats v as a hexadecimal number, in which bit 0 has the value 1.
func (v Bits) String() string {
	text := ""
	for i := len(v) - 1; i >= 0; i-- {
		if text != "" {
			text += fmt.Sprintf("%016x", v[i])
		} else if v[i] != 0 {
			text = strconv.FormatUint(v[i], 16)
		}
	}
	if text == "" {
		return "0"
	}
	return text
}

// kindText returns the name of a kind with its spaces replaced by hyphens.
func kindText(k Kind) string { return strings.ReplaceAll(k.String(), " ", "-") }

// String formats the request in the format of Up.String. It omits defaults (reduction sum, scale factors 1).
func (q *Request) String() string {
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
	if q.Device != tensor.Host {
		text += fmt.Sprintf(" device=%v", q.Device)
	}
	switch q.Kind {
	case Join:
		if q.Empty {
			text += " empty"
		}
	case AddProcessSet:
		text += " ranks=" + listText(q.Ranks)
		if q.MembersOnly {
			text += " members-only"
		}
	case RemoveProcessSet:
		text += fmt.Sprintf(" id=%d", q.Set)
	}
	if q.Kind.HasRoot() {
		text += fmt.Sprintf(" root=%d", q.Root)
	}
	if q.Kind.Reduces() {
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

// String formats the frame for logs and for the controller's golden tests, in the format of Up.String.
func (d *Down) String() string {
	var b strings.Builder
	switch d.Type {
	case DownHeartbeat:
		b.WriteString("heartbeat")
		if len(d.Ranks) > 0 {
			fmt.Fprintf(&b, " leaving=%s", listText(d.Ranks))
		}
		b.WriteString(channelText(d.Channels))
		return b.String()
	case DownClose:
		b.WriteString("close")
		return b.String()
	case DownLeft:
		fmt.Fprintf(&b, "left ranks=%s%s", listText(d.Ranks), channelText(d.Channels))
		return b.String()
	case DownFail:
		fmt.Fprintf(&b, "fail ranks=%s %s", listText(slices.Sorted(slices.Values(d.Ranks))), d.Reason)
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
	if t := d.Tuning; t != nil {
		fmt.Fprintf(&b, " tune fusion=%d cycle=%v segment=%d", t.FusionThresholdBytes, t.CycleTime,
			t.SegmentBytes)
		if t.CacheOff {
			b.WriteString(" cache-off")
		}
		if t.OneLevelAllreduce {
			b.WriteString(" one-level-allreduce")
		}
		if t.OneLevelAllgather {
			b.WriteString(" one-level-allgather")
		}
		if t.Allreduce != NoAlgorithm {
			fmt.Fprintf(&b, " allreduce=%v", t.Allreduce)
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

func grantText(g *Grant) string {
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
	if g.Backend != NoBackend {
		text += fmt.Sprintf(" %v/%v", g.Backend, g.Algorithm)
	}
	if len(g.Absent) > 0 {
		text += " absent=" + listText(g.Absent)
	}
	for _, r := range g.Full {
		if len(r.Devices) > 0 {
			text += " devices=" + listText(r.Devices)
		}
		switch r.Kind {
		case Join:
			text += fmt.Sprintf(" last=%d", r.Root)
		case AddProcessSet:
			text += fmt.Sprintf(" id=%d ranks=%s", r.Set, listText(r.Ranks))
		case RemoveProcessSet:
			text += fmt.Sprintf(" id=%d", r.Set)
		case Error:
			if len(r.Ranks) > 0 {
				text += " ranks=" + listText(r.Ranks)
			}
			text += fmt.Sprintf(" (%s)", r.Text)
		case Allgather:
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

package launch

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/gohvd/gohvd/internal/topo"
)

// These are the limits of a list of hosts.
const (
	// MaxHosts is the maximum number of hosts in a list.
	MaxHosts = 4096
	// MaxSlots is the maximum number of slots of a host.
	MaxSlots = 1 << 16
	// maxNameBytes is the maximum length of a host's name in bytes, including a user name before it.
	maxNameBytes = 255
	maxFileBytes = 1 << 20
)

// Host is an entry in a list of hosts.
type Host struct {
	// Name is a host name, or an address without brackets. A user name and @ may precede it. It contains only
	// letters, digits and . : - _ % @ and does not begin with a dash, so that no program takes it for an
	// option.
	Name string
	// Slots is the number of ranks that the host can run, at least 1, or 0 if the host is not in the list of
	// the user (AssignNodes).
	Slots int
}

// ParseHosts parses a list of hosts such as h1:2,[fd00::1]:2,10.0.0.1:4,h3. A host without a number has one
// slot. If a host occurs more than once, its slots add up. A comma may precede and follow the list, because
// programs that make lists often leave one there.
func ParseHosts(list string) ([]Host, error) {
	var hosts []Host
	words := strings.TrimSpace(list)
	words = strings.TrimSuffix(strings.TrimPrefix(words, ","), ",")
	for word := range strings.SplitSeq(words, ",") {
		h, err := parseHost(strings.TrimSpace(word))
		if err == nil {
			hosts, err = addHost(hosts, h)
		}
		if err == nil {
			continue
		}
		if fields := strings.Fields(list); len(fields) > 1 {
			meant := strings.Join(strings.FieldsFunc(list, betweenHosts), ",")
			if _, err := ParseHosts(meant); err == nil {
				return nil, fmt.Errorf("got %.80q, want commas between hosts, as in %.80s", list, meant)
			}
		}
		return nil, fmt.Errorf("got %.80q in %.80q, %w", word, list, err)
	}
	return hosts, nil
}

// betweenHosts reports whether r is in a list a comma or what users write instead of one.
func betweenHosts(r rune) bool { return r == ',' || unicode.IsSpace(r) }

// addHost adds h to hosts. If hosts already contains a host of this name, addHost adds the slots to it.
func addHost(hosts []Host, h Host) ([]Host, error) {
	i := slices.IndexFunc(hosts, func(other Host) bool { return other.Name == h.Name })
	switch {
	case i < 0 && len(hosts) == MaxHosts:
		return nil, fmt.Errorf("want at most %d hosts", MaxHosts)
	case i < 0:
		return append(hosts, h), nil
	}
	hosts[i].Slots += h.Slots
	if hosts[i].Slots > MaxSlots {
		return nil, fmt.Errorf("with which host %s has %d slots, want at most %d", h.Name, hosts[i].Slots, MaxSlots)
	}
	return hosts, nil
}

// parseHost parses name, name:slots, [address]:slots, or an IPv6 address without slots.
func parseHost(word string) (Host, error) {
	name, slots, err := cutHost(word)
	h := Host{Name: name, Slots: 1}
	if err == nil && slots != "" {
		number, ok := strings.CutPrefix(slots, ":")
		if !ok {
			return Host{}, errors.New("want a host and its slots, as in h1:2")
		}
		h.Slots, err = parseSlots(number)
	}
	return h, err
}

// cutHost splits word into the name of the host and the rest, such as ":2". It removes the brackets around an
// address, also behind a user name.
func cutHost(word string) (name, rest string, err error) {
	name = word
	user, address, open := strings.Cut(word, "[")
	inside, behind, closed := strings.Cut(address, "]")
	if open && closed && (user == "" || strings.HasSuffix(user, "@")) {
		name, rest = user+inside, behind
	} else if at := strings.IndexByte(word, ':'); at >= 0 && at == strings.LastIndexByte(word, ':') {
		name, rest = word[:at], word[at:]
	}
	return name, rest, checkHostName(name)
}

func checkHostName(name string) error {
	strange := strings.IndexFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') &&
			!strings.ContainsRune(".:-_%@", r)
	})
	if name == "" || name[0] == '-' || len(name) > maxNameBytes || strange >= 0 {
		return errors.New("want the name or the address of a host")
	}
	// Without this check, ParseHosts would accept a list that lacks a comma as one host. The job would then
	// have fewer hosts than intended.
	if strings.Contains(name, ":") {
		if _, err := netip.ParseAddr(name[strings.LastIndexByte(name, '@')+1:]); err != nil {
			return errors.New("want NAME:SLOTS, such as h1:2, or an IP address for each host, with commas between hosts")
		}
	}
	return nil
}

func parseSlots(text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > MaxSlots {
		return 0, fmt.Errorf("want a number of slots from 1 to %d", MaxSlots)
	}
	return n, nil
}

// ParseHostFile reads a file with one host per line. A line is "h1 slots=2" as for Open MPI and Horovod,
// "h1:2" as for MPICH, or "h1" for one slot. As for Open MPI, blanks around = are allowed, max_slots=N is
// allowed after the host, and the slots of a host that occurs more than once add up. ParseHostFile ignores a
// byte order mark, empty lines, and comments from # or // to the end of the line. The file may be at most
// 1 MiB long.
func ParseHostFile(path string) ([]Host, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxFileBytes {
		return nil, fmt.Errorf("%s has more than %d bytes", path, maxFileBytes)
	}
	var hosts []Host
	lines := bufio.NewScanner(bytes.NewReader(bytes.TrimPrefix(text, []byte("\ufeff"))))
	lines.Buffer(nil, maxFileBytes+1)
	for n := 1; lines.Scan(); n++ {
		line, _, _ := strings.Cut(lines.Text(), "#")
		line, _, _ = strings.Cut(line, "//")
		if strings.TrimSpace(line) == "" {
			continue
		}
		h, err := parseHostLine(line)
		if err == nil {
			hosts, err = addHost(hosts, h)
		}
		if err != nil {
			return nil, fmt.Errorf("%s, line %d: got %.80q, %w", path, n, strings.TrimSpace(line), err)
		}
	}
	if len(hosts) == 0 {
		return nil, fmt.Errorf("%s names no host", path)
	}
	return hosts, lines.Err()
}

// assignments matches = with the blanks around it.
var assignments = regexp.MustCompile(`\s*=\s*`)

// parseHostLine parses a line of a host file that names a host.
func parseHostLine(line string) (Host, error) {
	words := strings.Fields(assignments.ReplaceAllString(line, "="))
	perLine := errors.New("want one host per line, as HOST slots=N or HOST:N; max_slots=N may follow")
	if strings.Contains(line, ",") {
		return Host{}, perLine
	}
	h, err := parseHost(words[0])
	if err != nil {
		return Host{}, err
	}
	_, slots, _ := cutHost(words[0])
	most := MaxSlots
	for _, word := range words[1:] {
		name, number, _ := strings.Cut(word, "=")
		var to *int
		switch name = strings.ReplaceAll(name, "-", "_"); {
		case name == "slots" && slots == "":
			to, slots = &h.Slots, number
		case name == "max_slots" || name == "slots_max":
			to = &most
		default:
			return Host{}, perLine
		}
		if *to, err = parseSlots(number); err != nil {
			return Host{}, err
		}
	}
	if h.Slots > most {
		return Host{}, fmt.Errorf("want max_slots of at least %d, the number of slots", h.Slots)
	}
	return h, nil
}

// Slots returns how many slots all hosts have together.
func Slots(hosts []Host) (n int) {
	for _, h := range hosts {
		n += h.Slots
	}
	return n
}

// Assignment says where one rank runs: its host and its topology. The comment on topo.FromHosts explains
// local and cross ranks.
type Assignment struct {
	// Host is the index of the rank's host in the list of hosts.
	Host int
	topo.Topology
}

// Assign places np ranks, at least 1, on the hosts. The first ranks fill the slots of the first host, the
// next ranks fill the slots of the second host, and so on. Hosts at the end of the list may get no ranks. If
// there are fewer than np slots, Assign returns an error.
func Assign(hosts []Host, np int) ([]Assignment, error) {
	if have := Slots(hosts); np > have {
		names := make([]string, 0, len(hosts))
		for _, h := range hosts {
			names = append(names, fmt.Sprintf("%s has %d", h.Name, h.Slots))
		}
		return nil, fmt.Errorf(
			"got %d ranks, but the hosts have only %d slots (%.200s): lower -np, or raise the number after a "+
				"host in -H or --hostfile", np, have, strings.Join(names, ", "))
	}
	hostOf := make([]int, 0, np)
	for i, h := range hosts {
		hostOf = append(hostOf, slices.Repeat([]int{i}, min(h.Slots, np-len(hostOf)))...)
	}
	places := make([]Assignment, np)
	for r, t := range topo.FromHosts(hostOf) {
		places[r] = Assignment{hostOf[r], t}
	}
	return places, nil
}

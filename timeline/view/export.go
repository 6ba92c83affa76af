package view

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gohvd/gohvd/timeline/report"
)

// maxExported limits the bytes of the tiles in an exported page. A page that has reached it has only tiles of
// fewer levels.
const maxExported = 12 << 20

// modules are the modules of the page, those first that import no other. In an exported page they are one
// script, because a page from a file cannot load modules.
var modules = []string{"format.js", "dom.js", "data.js", "state.js", "timeline.js", "grid.js", "strip.js",
	"tables.js", "compare.js", "live.js", "main.js"}

// anonymous is a Source without the command, the settings and the paths of a job, which an exported page does
// not need. given matches the folders of the paths that the user has given, which may have spaces.
type anonymous struct {
	Source
	given *regexp.Regexp
}

// folders matches the folders of other paths in a text.
var folders = regexp.MustCompile(`\S*/(\S)`)

func (a anonymous) text(s string) string {
	return folders.ReplaceAllString(a.given.ReplaceAllString(s, "$1"), "$1")
}

func (a anonymous) Report() *report.Report {
	r := *a.Source.Report()
	r.Job = report.About{}
	r.Problems = a.texts(r.Problems)
	return &r
}

func (a anonymous) texts(texts []string) []string {
	texts = slices.Clone(texts)
	for i := range texts {
		texts[i] = a.text(texts[i])
	}
	return texts
}

func (a anonymous) Comparison() *report.Comparison {
	c := *a.Source.Comparison()
	c.Problems = a.texts(c.Problems)
	c.A.Title, c.B.Title = a.text(c.A.Title), a.text(c.B.Title)
	return &c
}

func (a anonymous) Info() *Info {
	i := *a.Source.Info()
	i.Title = a.text(i.Title)
	return &i
}

var (
	stars   = regexp.MustCompile(`(?m)^import \* as (\w+) from '\./(\w+\.js)';\n`)
	exports = regexp.MustCompile(`(?m)^export (?:async )?(?:function|const) ([\w$]+)`)
)

// Export writes the page and its data as one file. The file has the tiles of the whole time and of the first
// levels below it, as far as there is room. It has the names of tensors and hosts, but not the command line,
// the settings and the paths of the job. given has the paths that the user has given.
func Export(w io.Writer, source Source, given ...string) error {
	var known []string
	for _, path := range given {
		whole, title := filepath.Clean(path), strings.TrimRight(path, "/") // path may be a folder
		for _, folder := range []string{whole + "/", filepath.Dir(whole) + "/",
			title[:strings.LastIndexByte(title, '/')+1]} {
			if folder != "" {
				known = append(known, regexp.QuoteMeta(strings.ToValidUTF8(folder, "\uFFFD")))
			}
		}
	}
	slices.SortFunc(known, func(x, y string) int { return len(y) - len(x) }) // the regexp prefers the first
	a := anonymous{source, regexp.MustCompile("(?:" + strings.Join(known, "|") + `)(\S)`)}
	files := make(map[string]string)
	entries, err := page.ReadDir("page")
	if err != nil {
		return err
	}
	for _, e := range entries {
		text, err := page.ReadFile("page/" + e.Name())
		if err != nil {
			return err
		}
		files[e.Name()] = string(text)
	}
	data, err := exportData(a)
	if err != nil {
		return err
	}
	style, plot, script := files["uplot.css"]+files["view.css"], files["uplot.js"], bundle(files)
	hash := func(text string) string {
		sum := sha256.Sum256([]byte(text))
		return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
	}
	policy := fmt.Sprintf("default-src 'none'; script-src %s %s; style-src %s; img-src data:; base-uri 'none'; "+
		"form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'", hash(plot), hash(script),
		hash(style))
	text := files["index.html"]
	for _, r := range [][2]string{
		{`<meta charset="utf-8">`, `<meta charset="utf-8">` + "\n" +
			`<meta http-equiv="Content-Security-Policy" content="` + policy + `">`},
		{`<link rel="stylesheet" href="uplot.css">` + "\n", ""},
		{`<link rel="stylesheet" href="view.css">`, "<style>" + style + "</style>"},
		{`<script src="uplot.js" defer></script>`, "<script>" + plot + "</script>"},
		{`<script type="module" src="main.js"></script>`,
			`<script type="application/json" id="exported">` + data + "</script>\n" +
				`<script type="module">` + script + "</script>"},
	} {
		if !strings.Contains(text, r[0]) {
			return fmt.Errorf("view: the page has no %s", r[0])
		}
		text = strings.Replace(text, r[0], r[1], 1)
	}
	_, err = io.WriteString(w, text)
	return err
}

// bundle returns the modules of the page as one script. Each module is a function that returns its exports.
func bundle(files map[string]string) string {
	var b strings.Builder
	for _, name := range modules {
		text := files[name]
		text = stars.ReplaceAllString(text, "const $1 = modules['$2'];\n")
		text = strings.ReplaceAll(text, "import {", "const {")
		text = regexp.MustCompile(`(?m)^const (\{.*\}) from '\./(\w+\.js)';\n`).ReplaceAllString(text,
			"const $1 = modules['$2'];\n")
		var names []string
		for _, m := range exports.FindAllStringSubmatch(text, -1) {
			names = append(names, m[1])
		}
		text = regexp.MustCompile(`(?m)^export `).ReplaceAllString(text, "")
		fmt.Fprintf(&b, "modules['%s'] = (() => {\n%s\nreturn { %s };\n})();\n", name, text,
			strings.Join(names, ", "))
	}
	return "const modules = {};\n" + b.String()
}

// exportData returns the data of an exported page as a JSON object: a text in base64 for each address.
func exportData(source Source) (string, error) {
	all := make(map[string]string)
	size, z := 0, newWriter()
	add := func(name string, pairs ...string) error {
		q := url.Values{}
		for i := 0; i < len(pairs); i += 2 {
			q.Set(pairs[i], pairs[i+1])
		}
		body, _, err := answerTo(source, "", name, q)
		if err != nil {
			return err
		}
		key := name
		if len(q) > 0 {
			key += "?" + q.Encode()
		}
		all[key] = base64.StdEncoding.EncodeToString(pack(z, body))
		size += len(all[key])
		return nil
	}
	info := source.Info()
	requests := [][]string{{"info"}, {"report"}, {"window"}, {"grid", "name", "held"}, {"grid", "name", "caused"},
		{"grid", "name", "waited"}}
	if info.Matrix {
		requests = append(requests, []string{"grid", "name", "waits"})
	}
	if info.Compared {
		requests = append(requests, []string{"comparison"})
	}
	for _, r := range requests {
		if err := add(r[0], r[1:]...); err != nil {
			return "", err
		}
	}
	// level adds all tiles of a level, and reports whether there was room.
	level := func(rows string, count, level int) (bool, error) {
		for group := 0; group*info.TileRows < count; group++ {
			for index := range 1 << level {
				if size > maxExported {
					return false, nil
				}
				err := add("tile", "rows", rows, "align", "", "level", strconv.Itoa(level), "index",
					strconv.Itoa(index), "group", strconv.Itoa(group))
				if err != nil {
					return false, err
				}
			}
		}
		return true, nil
	}
	for l := range 8 {
		if room, err := level("ranks", len(info.Ranks), l); err != nil || !room {
			return marshal(all), err
		}
	}
	for _, r := range info.Ranks {
		rows := "rank:" + strconv.Itoa(r.Rank)
		labels, err := source.Labels(rows)
		if err != nil {
			return "", err
		}
		if err := add("labels", "rows", rows); err != nil {
			return "", err
		}
		for l := range 4 {
			if room, err := level(rows, min(len(labels), info.TileRows), l); err != nil || !room {
				return marshal(all), err
			}
		}
	}
	return marshal(all), nil
}

// marshal returns a JSON object that cannot end the script element in which it is, because characters that
// are special in HTML are escaped.
func marshal(all map[string]string) string {
	var b bytes.Buffer
	_ = json.NewEncoder(&b).Encode(all) // strings always have a text
	return b.String()
}

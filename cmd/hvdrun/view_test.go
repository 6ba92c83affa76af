package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

// TestView starts hvdrun view and loads the page as a browser does. The browser is a program that copies the
// page that it is to open.
func TestView(t *testing.T) {
	bin := t.TempDir()
	opened := filepath.Join(bin, "opened")
	browser := fmt.Sprintf("#!/bin/sh\nstat -c %%a \"$1\" | cat - \"$1\" >%s.new && mv %[1]s.new %[1]s\n", opened)
	testnet.WriteScript(t, filepath.Join(bin, "xdg-open"), browser)
	xdg := t.TempDir()
	cmd := hvdrun(t, "view", "--open", putTimelines(t))
	cmd.Env = append(os.Environ(), "SSH_CONNECTION=1.2.3.4 5 6.7.8.9 22", "XDG_RUNTIME_DIR="+xdg,
		"PATH="+bin+":"+os.Getenv("PATH"))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	url, found := strings.CutPrefix(strings.TrimSpace(line), "open ")
	if err != nil || !found {
		t.Fatalf("got %q, %v, want the address of the page", line, err)
	}
	if line, err = lines.ReadString('\n'); !strings.Contains(line, "first run: ssh -L ") {
		t.Errorf("got %q, %v, want a command for ssh", line, err)
	}
	page, err := os.ReadFile(opened)
	for begun := time.Now(); err != nil && time.Since(begun) < deadline; page, err = os.ReadFile(opened) {
		time.Sleep(10 * time.Millisecond)
	}
	if !strings.HasPrefix(string(page), "600\n") || !strings.Contains(string(page), url) {
		t.Errorf("the browser got %q, %v, want a file with mode 600 that redirects to %s", page, err, url)
	}
	client := testnet.Browser(t)
	base, _, _ := strings.Cut(url, "?")
	for _, c := range []struct{ url, want string }{
		{url, "<h1"}, {base + "data/report", "rank 1 held up all others for 5.00 ms per step"},
	} {
		a, err := client.Get(c.url)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(a.Body)
		a.Body.Close()
		if err != nil || a.StatusCode != 200 || !strings.Contains(string(body), c.want) {
			t.Errorf("%s: got %d %.200q, %v, want %q", c.url, a.StatusCode, body, err, c.want)
		}
	}
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("got %v after SIGINT, want exit status 0", err)
	}
	if left, err := filepath.Glob(filepath.Join(xdg, "gohvd", "*")); err != nil || len(left) > 0 {
		t.Errorf("got %v, %v, want that the file for the browser was removed", left, err)
	}
}

// A browser gets the name of --addr or, if hvdrun listens on all addresses, that of the host.
func TestPageAddress(t *testing.T) {
	for _, c := range []struct{ given, ip, want string }{
		{"127.0.0.1:0", "127.0.0.1", "127.0.0.1:99"}, {"localhost:0", "127.0.0.1", "localhost:99"},
		{"a.example:80", "10.0.0.1", "a.example:99"}, {"[::1]:0", "::1", "[::1]:99"},
		{":0", "::", hostName() + ":99"}, {"0.0.0.0:0", "0.0.0.0", hostName() + ":99"},
	} {
		if got := pageAddress(c.given, &net.TCPAddr{IP: net.ParseIP(c.ip), Port: 99}); got != c.want {
			t.Errorf("%s: got %s, want %s", c.given, got, c.want)
		}
	}
}

// If an export fails, a device and a link stay.
func TestExportRemovesNoDevice(t *testing.T) {
	link := filepath.Join(t.TempDir(), "out.html")
	if err := os.Symlink("/dev/full", link); err != nil {
		t.Fatal(err)
	}
	_, stderr, status := output(t, "view", "--export", link, putTimelines(t))
	if status != 1 || !strings.Contains(stderr, "no space left on device") {
		t.Errorf("got exit status %d and %q", status, stderr)
	}
	if _, err := os.Lstat(link); err != nil {
		t.Error(err)
	}
}

// TestViewOfWhatIsNone checks what hvdrun view says if it cannot show a page, or only a part.
func TestViewOfWhatIsNone(t *testing.T) {
	dir, empty, other, half := putTimelines(t), t.TempDir(), t.TempDir(), putTimelines(t)
	put := func(name, text string) {
		testnet.WriteFile(t, name, text)
	}
	put(filepath.Join(other, "notes.txt"), "hello")
	text := testnet.ReadFile(t, filepath.Join(half, "t.json"))
	put(filepath.Join(half, "t.json"), string(text[:len(text)/2]))
	mixed := filepath.Join(t.TempDir(), "mixed")
	if err := os.CopyFS(mixed, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	put(filepath.Join(mixed, "u.json"), strings.Replace(string(text), `"epoch":1`, `"epoch":2`, 1))
	l := testnet.Listen(t)
	defer l.Close()
	page := filepath.Join(t.TempDir(), "out.html")
	for _, c := range []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{"--export", page}, 2, "--export: got a running job, want FILE"},
		{[]string{"--compare", dir}, 2, "--compare: got a running job, want FILE"},
		{[]string{"--compare", filepath.Join(dir, "none.json"), dir}, 1, "--compare: "},
		{[]string{"--compare", dir, "--export", page, dir}, 0, "wrote " + page},
		{[]string{"2147483646"}, 2, "view: no hvdrun of this user with the process number 2147483646"},
		{[]string{filepath.Join(dir, "none.json")}, 1, "none.json: no such file or directory"},
		{[]string{empty}, 1, "the folder contains no timeline files"},
		{[]string{other}, 1, "notes.txt: byte 0: invalid character 'h' at start of value: want the JSON array"},
		{[]string{"--addr", l.Addr().String(), dir}, 1, "cannot serve the page at " + l.Addr().String()},
		{[]string{"--addr", "x", dir}, 1, "missing port in address"},
		{[]string{"--export", filepath.Join(dir, "none", "out.html"), dir}, 1, "no such file or directory"},
		{[]string{"--export", page, half}, 0, "wrote " + page},
		{[]string{"--export", filepath.Join(dir, "t.json"), dir}, 1, "t.json is one of the timelines"},
		{[]string{"--export", filepath.Join(dir, "t.json"), "--compare", dir, half}, 1,
			"t.json is one of the timelines"},
		{[]string{"--export", page, mixed}, 0, "wrote " + page},
	} {
		stdout, stderr, status := output(t, append([]string{"view"}, c.args...)...)
		if status != c.status || stdout != "" || !strings.Contains(stderr, c.want) ||
			strings.Count(strings.TrimSpace(stderr), "\n") > 1 {
			t.Errorf("%q: got exit status %d, %q and %q, want %d and %q", c.args, status, stdout, stderr,
				c.status, c.want)
		}
	}
	// A comparison says what is wrong with the files of both runs.
	stdout, _, _ := output(t, "timeline", half, "--compare", mixed)
	testnet.WantText(t, stdout,
		"note: A: a truncated file is used only up to the error: "+filepath.Join(half, "t.json")+": byte ",
		"note: B: "+filepath.Join(mixed, "u.json")+" is left out: it is of another epoch or job, with epoch 2 and 2 ranks",
	)
}

package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// maxFileBytes is the maximum size of a settings file. A file with all settings has about 2 KiB.
const maxFileBytes = 1 << 20

// readFile returns the values in a YAML file, by the name of the setting. The values are in the form of the
// environment.
func readFile(path string) (map[string]value, []warning, error) {
	data, err := readBounded(path)
	if err != nil {
		return nil, nil, fmt.Errorf("config: read the settings file: %w", err)
	}
	p := fileParser{path: path, values: make(map[string]value), lines: make(map[string]int)}
	if err := p.document(data); err != nil {
		return nil, nil, fmt.Errorf("config: settings file %s: %w", path, err)
	}
	return p.values, p.warnings, nil
}

func readBounded(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() // the error is ignored, because the file was only read
	data, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err == nil && len(data) > maxFileBytes {
		err = fmt.Errorf("%s: the file has more than %d bytes, which is the limit", path, maxFileBytes)
	}
	return data, err
}

type fileParser struct {
	path     string
	values   map[string]value
	lines    map[string]int // for each key, the line where it is set
	warnings []warning
}

func (p *fileParser) document(data []byte) error {
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	var doc, next yaml.Node
	switch err := decoder.Decode(&doc); {
	case errors.Is(err, io.EOF): // the file is empty or has only comments
		return nil
	case err != nil:
		return errors.New(strings.TrimPrefix(err.Error(), "yaml: "))
	}
	if err := decoder.Decode(&next); !errors.Is(err, io.EOF) {
		return errors.New("got several YAML documents, want one")
	}
	return p.mapping(doc.Content[0], "")
}

// mapping parses the keys of one level: of the whole document if section is empty, otherwise of that section.
func (p *fileParser) mapping(node *yaml.Node, section string) error {
	if node = resolve(node); isNull(node) {
		return nil
	}
	if node.Kind != yaml.MappingNode {
		return fmt.Errorf("line %d: got a single value or a list%s, want keys and values", node.Line,
			within(section))
	}
	for i := 0; i+1 < len(node.Content); i += 2 {
		key, content := node.Content[i], node.Content[i+1]
		var err error
		if section == "" && isSection(key.Value) {
			err = p.mapping(content, key.Value)
		} else {
			err = p.entry(strings.TrimPrefix(section+"."+key.Value, "."), key.Line, resolve(content))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func within(section string) string {
	if section == "" {
		return ""
	}
	return " in " + section
}

// entry parses the value of one key. key includes the section, as in "section.key".
func (p *fileParser) entry(key string, line int, node *yaml.Node) error {
	setting, ok := lookupKey(key)
	noUse, inert := inertByKey(key)
	if !ok && !inert {
		return fmt.Errorf("line %d: unknown key %s%s", line, key, suggest(nearestKey(key)))
	}
	if before, ok := p.lines[key]; ok {
		return fmt.Errorf("line %d: duplicate key %s, already set in line %d", line, key, before)
	}
	p.lines[key] = line
	if isNull(node) {
		return nil
	}
	text, ok := scalar(node)
	if !ok {
		return fmt.Errorf("line %d: %s: got nested values, want a value or a list of values", line, key)
	}
	if inert {
		if !same(text, noUse.Default) {
			p.warnings = append(p.warnings, warning{key, fmt.Sprintf("file %s line %d: %s has no effect: %s",
				p.path, line, key, noUse.Reason)})
		}
		return nil
	}
	env, err := setting.fromForm(text)
	if err != nil {
		return fmt.Errorf("line %d: %s: got %q, %w", line, key, text, err)
	}
	p.values[setting.Name] = value{env, Origin{Source: FromFile, File: p.path, Line: line}}
	return nil
}

// scalar returns the text of a value. The items of a list are separated by commas, as in the environment. The
// result ok is false if the value is a mapping.
func scalar(node *yaml.Node) (string, bool) {
	if node.Kind == yaml.ScalarNode {
		return node.Value, true
	}
	if node.Kind != yaml.SequenceNode {
		return "", false
	}
	items := make([]string, len(node.Content))
	for i, item := range node.Content {
		if item = resolve(item); item.Kind != yaml.ScalarNode {
			return "", false
		}
		items[i] = item.Value
	}
	return strings.Join(items, ","), true
}

// resolve returns the node that an alias refers to. It returns other nodes unchanged.
func resolve(node *yaml.Node) *yaml.Node {
	if node.Kind == yaml.AliasNode {
		return node.Alias
	}
	return node
}

// isNull reports whether a value is null or is left out, as in "key:".
func isNull(node *yaml.Node) bool { return node.Kind == yaml.ScalarNode && node.Tag == "!!null" }

// lookupKey returns the setting that has this key in the file. No setting has an empty key.
func lookupKey(key string) (Setting, bool) {
	return find(func(s Setting) bool { return key != "" && s.Key == key })
}

// isSection reports whether name is the name of a section, that is, whether a key begins with name and a dot.
func isSection(name string) bool {
	return slices.ContainsFunc(keys(), func(key string) bool { return strings.HasPrefix(key, name+".") })
}

// keys returns the keys that a settings file may have. Keys without effect come last.
func keys() []string {
	var list []string
	for _, s := range settings {
		if s.Key != "" {
			list = append(list, s.Key)
		}
	}
	for _, i := range inerts {
		if i.Key != "" {
			list = append(list, i.Key)
		}
	}
	return list
}

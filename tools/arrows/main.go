// Program arrows counts the structure of a Go module.
//
// For each package that is given by its path, it prints the arrows between the package's files. There is an
// arrow from file A to file B if A uses an identifier that B declares; a method or a field belongs to the
// file that declares it, not to that of its type. The program also prints the order of the files in which
// the fewest arrows run back, from a file to one before it, and the number of methods of each type.
//
// For the whole tree it prints the code lines, without blank lines, comments and generated files, the
// packages and the pages. Tests are no files of a package here, but have an area of their own in the tree.
//
//	go run ./arrows -C DIR ./internal/engine ./controller    # in the folder tools
//
// DIR is the module to count, so the program also counts older checkouts.
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"text/tabwriter"
)

func main() {
	dir := flag.String("C", "..", "count the module in this `folder`")
	tags := flag.String("tags", "", "build `tags` of the packages, separated by commas")
	verbose := flag.Bool("v", false, "print all arrows, and all types instead of the largest ten")
	only := flag.Bool("s", false, "print only the table of packages")
	tree := flag.Bool("tree", true, "count the tree")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: arrows [flags] [PACKAGE...]   (for example ./internal/engine)")
		flag.PrintDefaults()
	}
	flag.Parse()
	if err := run(*dir, *tags, *verbose, *only, *tree, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "arrows:", err)
		os.Exit(1)
	}
}

func run(dir, tags string, verbose, only, tree bool, patterns []string) error {
	var counted []*pkg
	if len(patterns) > 0 {
		var err error
		if counted, err = load(dir, tags, patterns); err != nil {
			return err
		}
	}
	if !only {
		for _, p := range counted {
			p.print(verbose)
		}
	}
	if len(counted) > 0 {
		printPackages(counted)
	}
	if tree {
		t, err := countTree(dir)
		if err != nil {
			return err
		}
		t.print()
	}
	return nil
}

// printPackages prints one row for each package.
func printPackages(packages []*pkg) {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "package\tfiles\tarrows\tin cycles\tback\tshare\tmethods of its largest types")
	for _, p := range packages {
		var largest []string
		for _, t := range p.types[:min(3, len(p.types))] {
			largest = append(largest, fmt.Sprintf("%s %d", t.name, t.methods))
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%s\t%s\t%s\n", p.path, len(p.files), p.arrows(), p.cyclic, p.backText(), p.share(),
			strings.Join(largest, ", "))
	}
	w.Flush()
	fmt.Println()
}

// print prints the order of the files of the package, the arrows and the types.
func (p *pkg) print(verbose bool) {
	fmt.Printf("%s: %d files, %d arrows, %s back (%s)\n\n", p.path, len(p.files), p.arrows(), p.backText(), p.share())
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "  file, in the order with the fewest back arrows\tback to\tuses")
	for at, f := range p.order {
		var back, down []string
		for before, g := range p.order {
			switch {
			case p.uses[f][g] == "":
			case before < at:
				back = append(back, fmt.Sprintf("%s (%s)", p.files[g], p.uses[f][g]))
			default:
				down = append(down, p.files[g])
			}
		}
		uses := fmt.Sprint(len(back)+len(down), " files")
		if verbose {
			uses = strings.Join(down, ", ")
		}
		fmt.Fprintf(w, "  %s\t%s\t%s\n", p.files[f], strings.Join(back, ", "), uses)
	}
	fmt.Fprintln(w)
	fmt.Fprintln(w, "  type\tmethods, with embedded ones\tof these declared in\tfunctions that take it")
	types := p.types
	if !verbose {
		types = types[:min(10, len(types))]
	}
	for _, t := range types {
		fmt.Fprintf(w, "  %s\t%d\t%d files\t%d\n", t.name, t.methods, t.files, t.taken)
	}
	w.Flush()
	fmt.Println()
}

// backText returns the number of back arrows, with "at most" if no proof exists that it is the smallest.
func (p *pkg) backText() string {
	if p.exact {
		return fmt.Sprint(p.back)
	}
	return fmt.Sprint("at most ", p.back)
}

// share returns the share of the arrows that run back.
func (p *pkg) share() string {
	if p.arrows() == 0 {
		return "0 %"
	}
	return fmt.Sprintf("%.0f %%", 100*float64(p.back)/float64(p.arrows()))
}

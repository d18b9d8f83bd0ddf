// One list per thing that can be picked; a chart is told of what its data know.
const views = {}, chosen = {}, actions = {export: true, source: false, compiled: false, editor: false};
for (const [name, spec] of Object.entries(specs))
  vegaEmbed('#chart-' + name, spec, {mode: 'vega', renderer: 'svg', actions: actions}).then(result => {
    views[name] = result.view;
    document.body.dataset.drawn = Object.keys(views).length;
  });
const bar = document.getElementById('picks');
for (const [title, choice] of Object.entries(choices)) {
  const label = document.createElement('label'), select = document.createElement('select');
  label.textContent = title + ' ';
  for (const name of ['all', ...Object.keys(choice.options)]) select.add(new Option(name, name));
  select.onchange = () => {
    chosen[title] = select.selectedIndex ? choice.options[select.value] : null;
    tell(choice.pick);
  };
  label.append(select);
  bar.append(label);
}
function tell(pick) {
  const lists = Object.keys(choices).filter(title => choices[title].pick === pick && chosen[title]).map(title => chosen[title]);
  const kept = lists.length ? lists.reduce((a, b) => a.filter(value => b.includes(value))) : null;
  for (const view of Object.values(views)) {
    try { view.signal('pick_' + pick, kept); } catch { continue; }  // a chart whose data do not know it
    view.runAsync();
  }
}

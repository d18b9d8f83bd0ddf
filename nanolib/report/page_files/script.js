// The lists at the top of the page filter every finding, chart and table.
const all = (what, of = document) => [...of.querySelectorAll(what)];
const chosen = name => document.getElementById(name).value;
const views = [], narrow = innerWidth < 720;

// Return a panel without axes and labels, for a card.
function smallOf(panel) {
  const layer = panel.layer.filter(one => one.mark.type !== 'text');
  const bare = JSON.parse(JSON.stringify(layer, (key, value) => key === 'axis' ? null : value));
  return {...panel, layer: bare, title: null, height: 64, config: {...panel.config, legend: {disable: true}}};
}
// Draw the panels of a chart, as wide as their container. The signal `n` is the chosen length.
async function draw(place) {
  const {title, hconcat, vconcat, ...whole} = specs[place.dataset.chart], small = place.className === 'mini';
  if (vconcat) place.style.setProperty('--least', '480px');
  const legend = {...whole.config.legend, columns: narrow ? 2 : 0, labelLimit: narrow ? 90 : 160};
  const shared = {
    ...whole, config: {...whole.config, axisY: {labelLimit: narrow ? 150 : 340}, legend},
    width: 'container', autosize: {type: 'fit-x', contains: 'padding'}, description: place.previousElementSibling.innerText,
    params: [{name: 'n', value: null}], transform: [{filter: '!n || datum.link_n == null || datum.link_n == n'}],
  };
  const panels = (hconcat ?? vconcat ?? [{}]).map(panel => ({...panel, ...shared}));
  for (const panel of small ? [smallOf(panels[0])] : panels) {
    const at = place.appendChild(Object.assign(document.createElement('div'), {className: 'plot'}));
    views.push((await vegaEmbed(at, panel, {mode: 'vega-lite', renderer: 'svg', actions: false})).view);
  }
}
async function follow() {
  const machine = chosen('machine'), n = chosen('length');
  for (const one of all('[data-machine]')) one.hidden = machine ? one.dataset.machine !== machine : !('newest' in one.dataset);
  for (const one of all('tr[data-n]')) one.hidden = n && one.dataset.n !== n;
  for (const one of all('[data-only]')) {
    const at = value => one.parentElement.querySelector(`:scope > [data-only="${value}"]`);
    one.hidden = one !== (at(n) ?? at(''));
  }
  await Promise.all(views.map(view => view.signal('n', Number(n) || null).runAsync()));
  dispatchEvent(new Event('resize'));  // A part that was hidden had no width.
  document.body.dataset.drawn = n + machine;  // Tests wait for this choice.
}
for (const pick of all('select')) pick.onchange = follow;
follow().then(async () => {
  for (const place of all('[data-chart]')) await draw(place);
  await follow();
  document.body.dataset.ready = 'yes';  // Tests wait for all charts.
});
